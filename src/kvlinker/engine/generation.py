"""One request under way: from logits to events."""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

from kvlinker.engine.base import (
    Delta,
    Failed,
    Finished,
    GenerationEvent,
    GenerationRequest,
    Sink,
    Timing,
    Usage,
)
from kvlinker.engine.linked_request import LinkedRequest
from kvlinker.engine.loading import LoadedModel
from kvlinker.engine.sampling import Sampler
from kvlinker.engine.text import TextStream
from kvlinker.errors import KVLinkerError
from kvlinker.events import Events, FirstToken, RequestFinished

logger = logging.getLogger(__name__)


class Generation(LinkedRequest):
    """Samples a request's tokens, decides when it ends, and tells its sink."""

    def __init__(
        self, request: GenerationRequest, sink: Sink, *, loaded: LoadedModel, max_tokens: int, events: Events
    ) -> None:
        super().__init__(request, max_tokens=max_tokens)
        self._sink = sink
        self._events = events
        self._tokenizer = loaded.tokenizer
        self._eos = frozenset() if request.sampling.ignore_eos else loaded.eos_token_ids
        self._sampler = Sampler(request.sampling, prompt_length=len(request.prompt))
        self._text = TextStream(loaded.tokenizer, request.sampling.stop)
        self._output_tokens = 0
        self._first_token: float | None = None

    def accept(self, logits: Tensor) -> None:
        """Sample the next token from ``logits`` [vocabulary] and pass it on; ends the request if it was the last."""
        assert self.sequence is not None
        sequence = self.sequence
        token = self._sampler.sample(logits, lambda: torch.from_numpy(sequence.tokens))
        self._output_tokens += 1
        if self._first_token is None:
            self._first_token = time.perf_counter()
            self._events.publish(FirstToken(self._first_token - self._submitted, self.request.policy.name))
        if token in self._eos:
            self._end("stop", Delta(self._text.finish(), (token,)))
            return
        text = self._text.push(token)
        logprob = self._sampler.logprob(logits, token, self._token_text)
        logprobs = () if logprob is None else (logprob,)
        if self._text.stopped:
            self._end("stop", Delta(text, (token,), logprobs))
        elif self._output_tokens >= self.max_tokens:
            text += self._text.finish()
            self._end("stop" if self._text.stopped else "length", Delta(text, (token,), logprobs))
        else:
            sequence.append(token)
            self._send(Delta(text, (token,), logprobs))

    def cancel(self) -> None:
        if not self.ended:
            self._end("cancelled")

    def fail(self, error: KVLinkerError) -> None:
        if not self.ended:
            self.ended = True
            self._publish("failed", Usage(0, 0, 0))
            self._send(Failed(error))

    def _end(self, reason: str, last: Delta | None = None) -> None:
        self.ended = True
        if last is not None:
            self._send(last)
        usage = self.usage(self._output_tokens)
        self._publish(reason, usage)
        self._send(Finished(reason, usage, self._timing()))

    def _publish(self, reason: str, usage: Usage) -> None:
        self._events.publish(
            RequestFinished(
                policy=self.request.policy.name,
                reason=reason,
                cached_tokens=usage.cached_tokens,
                recomputed_tokens=usage.recomputed_tokens,
                fresh_tokens=usage.fresh_tokens,
                output_tokens=usage.output_tokens,
            )
        )

    def _timing(self) -> Timing:
        now = time.perf_counter()
        started = self._started or now
        first = self._first_token or now
        return Timing(
            load=self._loaded - self._submitted,
            queue=max(started - self._loaded, 0.0),
            link=max(first - started, 0.0),
            decode=now - first,
        )

    def _token_text(self, token: int) -> str:
        text: str = self._tokenizer.decode([token])
        return text

    def _send(self, event: GenerationEvent) -> None:
        try:
            self._sink(event)
        except Exception:
            logger.exception("The receiver of a request's events failed; the request is cancelled.")
            self.cancelled = True
