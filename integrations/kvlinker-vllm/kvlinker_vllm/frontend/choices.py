"""Turns vLLM's output into the events of a request's choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvlinker.base.errors import KVLinkerError
from kvlinker.base.events import Events
from kvlinker.base.types.answers import Delta, TokenLogprob, Usage
from kvlinker.base.types.grammars import AnswerGrammar
from kvlinker.engines.contract.contract import GenerationRequest, Sink
from kvlinker.engines.contract.output import Output, RequestClock
from kvlinker_vllm.frontend.client import NewTokens
from kvlinker_vllm.frontend.linker import StoredLink
from kvlinker_vllm.protocol.transfer_plan import TransferOutcome


class VLLMRequest:
    """A request under way, with all of its choices and their shared state. The client's loop calls
    all methods except ``__init__``."""

    def __init__(
        self,
        request: GenerationRequest,
        sink: Sink,
        *,
        tokenizer: Any,
        max_tokens: int,
        events: Events,
        is_complete: Callable[[AnswerGrammar, Sequence[int]], bool],
    ) -> None:
        """``is_complete`` returns whether an answer's tokens are all that its grammar allows."""
        self.request = request
        self.is_complete = is_complete
        self.max_tokens = max_tokens
        self.clock = RequestClock()
        self._linked: StoredLink | None = None
        self._outcome: TransferOutcome | None = None
        self._found = 0
        self.choices = tuple(
            ChoiceOutput(self, index, sink, tokenizer, events) for index in range(request.n)
        )

    @property
    def open_choices(self) -> int:
        """The number of choices that have not ended."""
        return sum(not choice.ended for choice in self.choices)

    @property
    def tokens(self) -> int:
        """The number of tokens that it holds: the prompt's once, and those of all answers so
        far."""
        return len(self.request.prompt) + sum(choice.tokens for choice in self.choices)

    def mark_planned(self, linked: StoredLink) -> None:
        """Note that the prompt is linked, and vLLM has the request from now on."""
        self._linked = linked
        self.clock.started = self.clock.loaded  # until vLLM has reported how long it queued

    def note_outcome(self, outcome: TransferOutcome, choice: int) -> None:
        """Note the outcome of the transfer plan, which vLLM reports with each choice; the first
        report counts, but only the first choice shows how much of the prompt vLLM had before."""
        if choice == 0:
            self._found = outcome.found
        if self._outcome is None and self.clock.loaded is not None:
            self._outcome = outcome
            self.clock.started = self.clock.loaded + outcome.queued

    def usage(self, output_tokens: int) -> Usage:
        """Count the prompt's tokens by how they were computed, and one choice's output; all are
        zero before there is a plan."""
        if self._linked is None:
            return Usage(0, 0, 0, output_tokens)
        linked = self._outcome is None or self._outcome.linked
        return self._linked.usage(output_tokens, linked=linked, found=self._found)

    def cancel(self) -> None:
        """End all choices that have not ended as cancelled."""
        for choice in self.choices:
            choice.cancel()

    def fail(self, error: KVLinkerError) -> None:
        """End all choices that have not ended with this error."""
        for choice in self.choices:
            choice.fail(error)


class ChoiceOutput:
    """Passes the tokens that vLLM generates for one choice to the request's sink."""

    def __init__(
        self, request: VLLMRequest, index: int, sink: Sink, tokenizer: Any, events: Events
    ) -> None:
        self.index = index
        self.ended = False
        self._request = request
        self._grammar = request.request.sampling.grammar
        self._token_ids: list[int] = []  # of an answer that follows a grammar
        self._output = Output(
            request.request,
            sink,
            choice=index,
            clock=request.clock,
            tokenizer=tokenizer,
            events=events,
            broken=self._break,
        )

    @property
    def tokens(self) -> int:
        """The number of generated tokens."""
        return self._output.tokens

    def accept(self, new: NewTokens) -> None:
        """Pass on vLLM's new tokens. Ends the choice with its last tokens, or after a stop
        string."""
        if new.outcome is not None:
            self._request.note_outcome(new.outcome, self.index)
        is_whole = self._is_whole(new)
        for index, token in enumerate(new.token_ids):
            is_last = index == len(new.token_ids) - 1
            ends = new.reason if is_last and not is_whole else None
            if self._output.stops_at(token):
                ends = "stop"
            end = self._output.push(token, self._logprobs(token, new, index), ends=ends)
            if end is not None:
                self._end(*end)
            if self.ended:
                return
        if new.reason == "error":
            self.fail(KVLinkerError("vLLM failed on this request; see its log."))
        elif new.reason is not None:
            reason = "stop" if is_whole else new.reason
            self._end(reason if reason in ("stop", "length") else "cancelled", self._output.rest())

    def _is_whole(self, new: NewTokens) -> bool:
        """Note new tokens; return whether an answer that has as many as it may have is complete."""
        if self._grammar is None:
            return False
        self._token_ids += new.token_ids
        return new.reason == "length" and self._request.is_complete(self._grammar, self._token_ids)

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
        count = self._request.request.sampling.logprobs or 0
        best = sorted(found.items(), key=lambda entry: -entry[1])[:count]
        text = self._output.token_text
        return (
            TokenLogprob(
                token,
                text(token),
                found[token],
                tuple(TokenLogprob(t, text(t), v) for t, v in best),
            ),
        )

    def _break(self) -> None:
        self.ended = True

    def _end(self, reason: str, last: Delta | None = None) -> None:
        self.ended = True
        self._output.finish(reason, self._request.usage(self._output.tokens), last)
