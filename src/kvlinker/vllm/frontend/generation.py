"""One request under way in vLLM: from its output to events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvlinker.engine.contract import GenerationRequest, Sink
from kvlinker.engine.output import Output
from kvlinker.errors import KVLinkerError
from kvlinker.events import Events
from kvlinker.types.answers import Delta, Timing, TokenLogprob, Usage
from kvlinker.vllm.frontend.client import NewTokens
from kvlinker.vllm.frontend.planning import PlannedLink
from kvlinker.vllm.protocol.transfer_plan import Outcome


class Generation:
    """Tells its sink what happens. The client's loop calls all but init."""

    def __init__(
        self, request: GenerationRequest, sink: Sink, *, tokenizer: Any, max_tokens: int, events: Events
    ) -> None:
        self.request = request
        self.max_tokens = max_tokens
        self.ended = False
        self._output = Output(request, sink, tokenizer=tokenizer, events=events, broken=self._break)
        self._link: PlannedLink | None = None
        self._outcome = Outcome(linked=True)
        self._submitted = time.perf_counter()
        self._loaded = self._submitted

    @property
    def tokens(self) -> int:
        """Of the prompt and the answer so far."""
        return len(self.request.prompt) + self._output.tokens

    def mark_loaded(self) -> None:
        """All chunks are at hand."""
        self._loaded = time.perf_counter()

    def mark_planned(self, link: PlannedLink) -> None:
        """From now on the request is vLLM's."""
        self._link = link

    def accept(self, new: NewTokens) -> None:
        """Pass on what vLLM generated. Ends the request with its last tokens, or behind a stop string."""
        if new.outcome is not None:
            self._outcome = new.outcome
        for index, token in enumerate(new.token_ids):
            ends = new.reason if index == len(new.token_ids) - 1 else None
            end = self._output.push(token, self._logprobs(token, new, index), ends=ends)
            if end is not None:
                self._end(*end)
            if self.ended:
                return
        if new.reason == "error":
            self.fail(KVLinkerError("vLLM failed on this request; see its log."))
        elif new.reason is not None:
            self._end("length" if new.reason == "length" else "cancelled", self._output.rest())

    def cancel(self) -> None:
        if not self.ended:
            self._end("cancelled")

    def fail(self, error: KVLinkerError) -> None:
        if not self.ended:
            self.ended = True
            self._output.fail(error)

    def _logprobs(self, token: int, new: NewTokens, index: int) -> tuple[TokenLogprob, ...]:
        if new.logprobs is None:
            return ()
        found: Mapping[int, float] = new.logprobs[index]
        count = self.request.sampling.logprobs or 0
        best = sorted(found.items(), key=lambda entry: -entry[1])[:count]
        text = self._output.token_text
        return (TokenLogprob(token, text(token), found[token], tuple(TokenLogprob(t, text(t), v) for t, v in best)),)

    def _end(self, reason: str, last: Delta | None = None) -> None:
        self.ended = True
        self._output.finish(reason, self._usage(), self._timing, last)

    def _break(self) -> None:
        self.ended = True

    def _usage(self) -> Usage:
        """Of the plan, or if vLLM computed all itself, of that; nothing before there is a plan."""
        link = self._link
        if link is None:
            return Usage(0, 0, 0, self._output.tokens)
        plan = link.plan
        all_cached = plan.cached_tokens + plan.recomputed_tokens
        recomputed = link.recomputed_tokens if self._outcome.linked else all_cached
        cached = all_cached - recomputed
        return Usage(cached, recomputed, plan.fresh_tokens, self._output.tokens)

    def _timing(self) -> Timing:
        now = time.perf_counter()
        first = self._output.first_token or now
        rest = max(first - self._loaded, 0.0)
        queued = min(self._outcome.queued, rest)
        return Timing(queue=queued, load=self._loaded - self._submitted, link=rest - queued, decode=now - first)
