"""Links the prompt of a request, takes the tokens to compute from the link, and explains it if the
request asks for that."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import ClassVar, TypeVar

from torch import Tensor

from kvlinker.base.errors import KVLinkerError
from kvlinker.base.types.answers import Usage
from kvlinker.base.types.chunks import Chunk
from kvlinker.engines.contract.contract import GenerationRequest
from kvlinker.engines.contract.observation import ChunkWatch, QuestionProbe
from kvlinker.engines.contract.output import RequestClock
from kvlinker.engines.embedded.decoding.logprobs import Head, LogprobCollector, first_scored
from kvlinker.engines.embedded.execution.batch import SharedChunk
from kvlinker.engines.embedded.execution.capturing import Recorder
from kvlinker.engines.embedded.kv_cache.paths import SequencePath, linked_path
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.requests.request import (
    Ending,
    FutureRequest,
    Request,
    ResultKind,
)
from kvlinker.engines.embedded.requests.sequence import Refining, TokenSequence
from kvlinker.linking.explanation import Explanation
from kvlinker.linking.link import Link
from kvlinker.linking.plan import Range, ranges
from kvlinker.linking.refinement import Refinement
from kvlinker.prompting.segments import Prompt
from kvlinker.store.loading.arriving import KV

T = TypeVar("T")

Linked = Callable[["PromptRequest"], object]
"""Takes a request whose prompt has just been computed; called once per prompt, in the engine's
thread."""


class PromptRequest(Request):
    """A request for a linked prompt: an answer, an explanation or log probabilities."""

    kind = ResultKind.ANSWER

    _keys: tuple[str, ...] = ()

    explains: ClassVar[bool] = False
    """True if the figures that a policy decides by are recorded."""

    reuses = False
    """True if it reuses the KV of earlier requests, and leaves its own to later ones."""

    def __init__(
        self,
        request: GenerationRequest,
        loaded: LoadedModel,
        *,
        max_tokens: int = 0,
        linked: Linked | None = None,
        head: Head | None = None,
        top: int = 0,
    ) -> None:
        """``max_tokens`` is the most tokens to generate; ``linked`` is called when the prompt is
        computed. ``head`` computes the log probabilities of the prompt's last tokens, with those of
        the ``top`` likeliest in their places; None where they are not asked for."""
        super().__init__()
        self.request = request
        self.tenant = request.tenant
        self.workflow = request.workflow
        self.clock = RequestClock()
        self.link: Link | None = None
        self.resident_only = False
        """True if chunks that are not in memory are computed rather than loaded, since loading them
        has failed before."""

        self.made: set[Chunk] = set()
        """The chunks whose KV was computed for this very request."""

        # without attention, all tokens are computed alike in all layers
        self._layers = max(1, len(loaded.layers))
        self._attends = bool(loaded.layers)
        self._cost = loaded.cost
        self._max_tokens = max_tokens
        self._linked = linked
        self._head = head
        self._top = min(top, loaded.vocabulary)
        self._scored: LogprobCollector | None = None
        self._attention: QuestionProbe | None = None

    @property
    def pending(self) -> Sequence[Range]:
        """The positions that are left to compute; before the prompt is linked, its fresh tokens."""
        return (
            ranges(~self.request.prompt.cached) if self.sequence is None else self.sequence.pending
        )

    @property
    def refinement(self) -> Refinement | None:
        """The driver of a policy that refines, which knows what it dropped in each layer; None
        before the first step and for other policies."""
        return None if self.sequence is None else self.sequence.refinement

    def mark_started(self) -> None:
        if self.clock.started is None:
            self.clock.mark_started()

    def lose(self) -> None:
        self.sequence = self.link = self.clock.started = None
        self.resident_only = True

    def make_sequence(
        self, link: Link, kvs: Sequence[KV], keys: Sequence[str], restored: Sequence[KV | None] = ()
    ) -> TokenSequence:
        """Return the sequence to compute for this request, linked by ``link`` from the KV of its
        chunks. ``keys`` are those of all chunks of the prompt; ``restored`` has the KV that it
        reuses from disk, None if it is lost."""
        self.clock.mark_loaded()
        self._keys = tuple(keys)
        assert link.plan is not None
        prompt = link.plan.prompt
        if self.request.shows_attention and self._attends:
            self._attention = QuestionProbe(self._layers, len(prompt))
        return TokenSequence(
            prompt.tokens,
            link.plan.runs,
            shared=[
                SharedChunk(kv, placed.start, placed.rotary_start, placed.first, placed.last)
                for placed, kv in link.placed(kvs)
            ],
            path=self._path(link),
            reused=prompt.reused,
            restored=(
                ()
                if prompt.reused is None
                else tuple(zip(prompt.reused.stored, restored, strict=True))
            ),
            most_tokens=len(prompt) + self._max_tokens,
            answer=self._answer_recorder(len(prompt)),
            probe=QuestionProbe(self._layers, len(prompt)) if link.probing else None,
            refine=self._refine(link),
            logprobs=self._collector(prompt),
            observer=self._attention,
            marks=self._marks(prompt),
        )

    def advance(self, logits: Tensor | None) -> Ending | None:
        assert self.sequence is not None
        assert self.link is not None
        if self.sequence.probe is not None:
            self.link = self.link.with_attention(self.sequence.probe.attention)
            assert self.link.plan is not None
            self.sequence.relink(
                self.link.plan.runs, self._refine(self.link), self._path(self.link)
            )
            return None
        if self.refinement is not None and self.refinement.error is not None:
            raise self.link.failed(self.refinement.error)
        assert logits is not None, "only a first pass wants none"
        if self._linked is not None:
            self._linked(self)
            self._linked = None
        return self._accept(logits)

    def _usage(self, output_tokens: int = 0) -> Usage:
        """Count the prompt's tokens by how they were computed, without those that are left to
        compute; zeros before the first step."""
        if self.clock.started is None or self.link is None:
            return Usage(0, 0, 0)
        usage = self.link.usage(self.refinement, output_tokens=output_tokens, made=self.made)
        if self.sequence is None:
            return usage
        usage, left = usage.without(self.sequence.missed), self.sequence.left_of_prompt
        again = min(int(self.link.prompt.cached[left].sum()), usage.recomputed_tokens)
        return replace(
            usage,
            recomputed_tokens=usage.recomputed_tokens - again,
            fresh_tokens=max(0, usage.fresh_tokens - (len(left) - again)),
        )

    def _explanation(self) -> Explanation:
        """Explain how the prompt was linked, which has been computed."""
        assert self.link is not None
        assert self.sequence is not None
        reused = self.link.prompt.reused
        return self.link.explanation(
            self.refinement,
            layers=self._layers,
            cost=self._cost,
            made=self.made,
            missed=None if reused is None else reused.own[len(reused.own) - self.sequence.missed :],
            attention=None if self._attention is None else self._attention.attention,
        )

    def _path(self, link: Link) -> SequencePath | None:
        """Return the path that the KV of the linked prompt depends on; None if it is not kept."""
        assert link.plan is not None
        return linked_path(self.request.sharer, link.plan, self._keys) if self.reuses else None

    def _collector(self, prompt: Prompt) -> LogprobCollector | None:
        """Return a collector of the log probabilities of ``prompt`` (as the policy arranged it);
        None if the request wants none."""
        if self._head is not None:
            self._scored = LogprobCollector(
                prompt.tokens, self._head, first=first_scored(prompt), top=self._top
            )
        return self._scored

    def _marks(self, prompt: Prompt) -> Sequence[int]:
        """Return the positions at which its state is kept for later prompts."""
        return ()

    def _answer_recorder(self, start: int) -> Recorder | None:
        """Return the collector of the KV of the answer, which begins at this position; None if it
        is not to be kept."""
        return None

    def _refine(self, link: Link) -> Callable[[], Refining] | None:
        if link.probing or not link.policy.needs.refines:
            return None
        return partial(
            _refining, link, self._layers, explains=self.explains or self.request.explains
        )

    def _forget(self) -> None:
        """Release the chunks' KV: a caller who keeps the request's handle must not keep it in
        memory, and layers that have not arrived need not be read for this request."""
        if self.sequence is not None:
            for kv in self.sequence.arriving:
                kv.give_up()
        self.sequence = self.link = None

    @abstractmethod
    def _accept(self, logits: Tensor) -> Ending | None:
        """Continue with the last token's ``logits`` [vocabulary]."""


def _refining(link: Link, layers: int, *, explains: bool) -> Refining:
    watch = (
        ChunkWatch(link.prompt.spans, len(link.prompt))
        if link.policy.needs.chunk_attention
        else None
    )
    refinement = link.refinement(layers, watch=watch, explains=explains)
    assert refinement is not None
    return Refining(refinement, watch)


class PromptFuture(PromptRequest, FutureRequest[T]):
    """A request for a prompt whose value is ready when a generation would sample its first
    token."""

    def fail(self, error: KVLinkerError) -> None:
        self._forget()
        super().fail(error)

    def _accept(self, logits: Tensor) -> Ending:
        return partial(self._finish, self._value())

    def _finish(self, value: T) -> None:
        self._forget()
        self.future.set_result(value)

    @abstractmethod
    def _value(self) -> T:
        """Return the request's result, now that its prompt is computed."""


class _EndedByCancelling(Future[T]):
    """A future that callers cannot cancel under the engine's hands, but whose request the engine
    ends then: the future has its error."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end = end

    def cancel(self) -> bool:
        self._end()
        return False


class Explaining(PromptFuture[Explanation]):
    """Asks how a prompt is linked. It does not count as a use of its chunks."""

    explains = True

    def __init__(
        self,
        request: GenerationRequest,
        loaded: LoadedModel,
        *,
        cancel: Callable[[Sequence[Request]], None],
    ) -> None:
        """``cancel`` has the engine end requests."""
        super().__init__(request, loaded)
        self.future = _EndedByCancelling(partial(cancel, (self,)))
        self.future.set_running_or_notify_cancel()

    def _value(self) -> Explanation:
        return self._explanation()
