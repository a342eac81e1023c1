"""One request under way in vLLM: from its output to events."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from kvlinker.engine.base import (
    Delta,
    Failed,
    Finished,
    GenerationEvent,
    GenerationRequest,
    Sink,
    Timing,
    TokenLogprob,
    Usage,
)
from kvlinker.engine.text import TextStream
from kvlinker.errors import KVLinkerError
from kvlinker.events import Events, FirstToken, RequestFinished
from kvlinker.linking.plan import LinkPlan
from kvlinker.vllm.client import NewTokens

logger = logging.getLogger(__name__)


class Generation:
    """Tells its sink what happens. The client's loop calls all but init."""

    def __init__(
        self, request: GenerationRequest, sink: Sink, *, tokenizer: Any, max_tokens: int, events: Events
    ) -> None:
        self.request = request
        self.max_tokens = max_tokens
        self.ended = False
        self._sink = sink
        self._tokenizer = tokenizer
        self._events = events
        self._text = TextStream(tokenizer, request.sampling.stop)
        self._plan: LinkPlan | None = None
        self._linked = True
        self._output_tokens = 0
        self._submitted = time.perf_counter()
        self._planned = self._submitted
        self._first_token: float | None = None

    @property
    def tokens(self) -> int:
        """Of the prompt and the answer so far."""
        return len(self.request.prompt) + self._output_tokens

    def mark_planned(self, plan: LinkPlan) -> None:
        """All chunks are at hand; from now on the request is vLLM's."""
        self._plan = plan
        self._planned = time.perf_counter()

    def accept(self, new: NewTokens) -> None:
        """Pass on what vLLM generated. Ends the request with its last tokens, or behind a stop string."""
        if new.linked is not None:
            self._linked = new.linked
        for index, token in enumerate(new.token_ids):
            is_last = new.reason is not None and index == len(new.token_ids) - 1
            logprobs = None if new.logprobs is None else new.logprobs[index]
            self._accept_token(token, logprobs, new.reason if is_last else None)
            if self.ended:
                return
        if new.reason == "error":
            self.fail(KVLinkerError("vLLM failed on this request; see its log."))
        elif new.reason is not None and not self.ended:
            self._end("length" if new.reason == "length" else "cancelled", self._rest())

    def cancel(self) -> None:
        if not self.ended:
            self._end("cancelled")

    def fail(self, error: KVLinkerError) -> None:
        if not self.ended:
            self.ended = True
            self._publish("failed", Usage(0, 0, 0))
            self._send(Failed(error))

    def _accept_token(self, token: int, logprobs: Mapping[int, float] | None, reason: str | None) -> None:
        self._output_tokens += 1
        if self._first_token is None:
            self._first_token = time.perf_counter()
            self._events.publish(FirstToken(self._first_token - self._submitted, self.request.policy.name))
        if reason == "stop":  # kvlinker's stop strings are not vLLM's: this is the end of the answer
            self._end("stop", Delta(self._text.finish(), (token,)))
            return
        text = self._text.push(token)
        told = () if logprobs is None else (self._logprob(token, logprobs),)
        if self._text.stopped:
            self._end("stop", Delta(text, (token,), told))
        elif reason == "length":
            text += self._text.finish()
            self._end("stop" if self._text.stopped else "length", Delta(text, (token,), told))
        else:
            self._send(Delta(text, (token,), told))

    def _logprob(self, token: int, logprobs: Mapping[int, float]) -> TokenLogprob:
        count = self.request.sampling.logprobs or 0
        best = sorted(logprobs.items(), key=lambda entry: -entry[1])[:count]
        top = tuple(TokenLogprob(other, self._token_text(other), value) for other, value in best)
        return TokenLogprob(token, self._token_text(token), logprobs[token], top)

    def _token_text(self, token: int) -> str:
        text: str = self._tokenizer.decode([token])
        return text

    def _rest(self) -> Delta | None:
        text = self._text.finish()
        return Delta(text, ()) if text else None

    def _end(self, reason: str, last: Delta | None = None) -> None:
        self.ended = True
        if last is not None:
            self._send(last)
        usage = self._usage()
        self._publish(reason, usage)
        self._send(Finished(reason, usage, self._timing()))

    def _usage(self) -> Usage:
        """Of the plan, or if vLLM computed all itself, of that; nothing before there is a plan."""
        plan = self._plan
        if plan is None:
            return Usage(0, 0, 0, self._output_tokens)
        cached = plan.cached_tokens if self._linked else 0
        recomputed = plan.cached_tokens + plan.recomputed_tokens - cached
        return Usage(cached, recomputed, plan.fresh_tokens, self._output_tokens)

    def _timing(self) -> Timing:
        """vLLM does not tell when a request's first step begins: the time in its queue counts as linking."""
        now = time.perf_counter()
        first = self._first_token or now
        return Timing(load=self._planned - self._submitted, link=max(first - self._planned, 0.0), decode=now - first)

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

    def _send(self, event: GenerationEvent) -> None:
        try:
            self._sink(event)
        except Exception:
            logger.exception("The receiver of a request's events failed; the request is cancelled.")
            self.ended = True
