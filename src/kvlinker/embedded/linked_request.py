"""What all requests for a linked prompt have in common, whatever they want of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from kvlinker.embedded.link_loading import LoadedLink
from kvlinker.embedded.logprobs import LogprobCollector
from kvlinker.embedded.sequence import Sequence
from kvlinker.engine.contract import GenerationRequest
from kvlinker.engine.observation import ChunkWatch, QuestionProbe
from kvlinker.engine.output import RequestClock
from kvlinker.errors import KVLinkerError
from kvlinker.linking.link import Link
from kvlinker.linking.refinement import Refinement
from kvlinker.prompt.segments import Prompt
from kvlinker.types.answers import Usage


class LinkedRequest(ABC):
    """A request from its arrival to its end. The engine's thread calls all but init and ``make_sequence``."""

    explains: ClassVar[bool] = False
    """What policies look at is kept."""

    def __init__(self, request: GenerationRequest, *, max_tokens: int) -> None:
        self.request = request
        self.max_tokens = max_tokens
        self.sequence: Sequence | None = None
        self.link: Link | None = None
        self.cancelled = False
        self.ended = False
        self._answering = False
        self.lost_before = False
        self.clock = RequestClock()

    def mark_loaded(self, link: Link, sequence: Sequence) -> None:
        """All chunks' KV is at hand; from now on the request, as ``sequence``, waits for its first step."""
        self.sequence = sequence
        self.link = link
        self.clock.mark_loaded()

    def mark_lost(self) -> None:
        """A chunk's KV did not come after all: the request is loaded again, before anything came of it."""
        self.sequence = self.link = self.clock.started = None
        self.lost_before = True

    def mark_started(self) -> None:
        """A step with its tokens begins."""
        if self.clock.started is None:
            self.clock.mark_started()

    def linked(self) -> Link | None:
        """By what its prompt was computed; None when this was asked before, and for requests that explain."""
        if self._answering or self.explains:
            return None
        self._answering = True
        return self.link

    def collector(self, prompt: Prompt) -> LogprobCollector | None:
        """What collects the log probabilities of ``prompt``, the request's as it was arranged, if they are wanted."""
        return None

    def usage(self, output_tokens: int = 0) -> Usage:
        """What became of the prompt's tokens so far; none before the first step."""
        if self.clock.started is None or self.link is None:
            return Usage(0, 0, 0)
        refinement = None if self.sequence is None else self.sequence.refinement
        return self.link.usage(refinement, output_tokens=output_tokens)

    def make_sequence(self, loaded: LoadedLink, *, layers: int) -> Sequence:
        """What the engine has to compute for this request, with its link, in a model of so many ``layers``."""
        link, plan = loaded.link, loaded.link.plan
        assert plan is not None
        return Sequence(
            plan.prompt.tokens,
            plan.runs,
            placements=link.placed(loaded.kvs),
            most_tokens=plan.length + self.max_tokens,
            probe=QuestionProbe(layers, plan.length) if link.probing else None,
            refine=self._refinement_of(link, layers),
            logprobs=self.collector(plan.prompt),
        )

    def relink(self, probe: QuestionProbe, *, layers: int) -> None:
        """The first pass is done: plan the second, and have the sequence compute it. Raises KVLinkerError."""
        assert self.link is not None
        assert self.sequence is not None
        self.link = self.link.with_attention(probe.attention)
        assert self.link.plan is not None
        self.sequence.relink(self.link.plan.runs, self._refinement_of(self.link, layers))

    def _refinement_of(self, link: Link, layers: int) -> Callable[[], tuple[Refinement, ChunkWatch | None]] | None:
        if link.probing or not link.policy.needs.refines:
            return None

        def begin() -> tuple[Refinement, ChunkWatch | None]:
            needed = link.policy.needs.chunk_attention
            watch = ChunkWatch(link.prompt.spans, len(link.prompt)) if needed else None
            refinement = link.refinement(layers, watch=watch, explains=self.explains)
            assert refinement is not None
            return refinement, watch

        return begin

    @abstractmethod
    def accept(self, logits: Tensor) -> None:
        """The last token's ``logits`` [vocabulary] are there."""

    @abstractmethod
    def cancel(self) -> None:
        """End without a result, as the caller wished."""

    @abstractmethod
    def fail(self, error: KVLinkerError) -> None:
        """End without a result, by our fault."""
