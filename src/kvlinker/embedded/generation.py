"""One request under way: from logits to events."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlinker.embedded.linked_request import LinkedRequest
from kvlinker.embedded.model.loading import LoadedModel
from kvlinker.embedded.sampling import Sampler
from kvlinker.engine.contract import GenerationRequest, Sink
from kvlinker.engine.output import Output
from kvlinker.errors import KVLinkerError
from kvlinker.events import Events
from kvlinker.types.answers import Delta


class Generation(LinkedRequest):
    """Samples a request's tokens, decides when it ends, and tells its sink."""

    def __init__(
        self,
        request: GenerationRequest,
        sink: Sink,
        *,
        choice: int,
        loaded: LoadedModel,
        max_tokens: int,
        events: Events,
    ) -> None:
        super().__init__(request, max_tokens=max_tokens)
        self._eos = frozenset() if request.sampling.ignore_eos else loaded.eos_token_ids
        self._sampler = Sampler(request.sampling_of(choice), prompt_length=len(request.prompt))
        self._output = Output(
            request,
            sink,
            choice=choice,
            clock=self.clock,
            tokenizer=loaded.tokenizer,
            events=events,
            broken=self._break,
        )

    def accept(self, logits: Tensor) -> None:
        """Sample the next token from ``logits`` [vocabulary] and pass it on; ends the request if it was the last."""
        assert self.sequence is not None
        sequence = self.sequence
        token = self._sampler.sample(logits, lambda: torch.from_numpy(sequence.tokens))
        if token in self._eos:
            end = self._output.push(token, ends="stop")
        else:
            is_last = self._output.tokens + 1 >= self.max_tokens
            logprob = self._sampler.logprob(logits, token, self._output.token_text)
            told = () if logprob is None else (logprob,)
            end = self._output.push(token, told, ends="length" if is_last else None)
        if end is None:
            sequence.append(token)
        else:
            self._end(*end)

    def cancel(self) -> None:
        if not self.ended:
            self._end("cancelled")

    def fail(self, error: KVLinkerError) -> None:
        if not self.ended:
            self.ended = True
            self._output.fail(error)

    def _end(self, reason: str, last: Delta | None = None) -> None:
        self.ended = True
        self._output.finish(reason, self.usage(self._output.tokens), last)

    def _break(self) -> None:
        self.cancelled = True
