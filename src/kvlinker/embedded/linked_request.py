"""What all requests for a linked prompt have in common, whatever they want of it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from torch import Tensor

from kvlinker.embedded.link_loading import Link
from kvlinker.embedded.logprobs import LogprobCollector
from kvlinker.embedded.sequence import Sequence
from kvlinker.engine.contract import GenerationRequest
from kvlinker.engine.observation import QuestionProbe
from kvlinker.errors import KVLinkerError
from kvlinker.linking.plan import LinkPlan
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
        self.plan: LinkPlan | None = None
        self.cancelled = False
        self.ended = False
        self._answering = False
        self.lost_before = False
        self._link: Link | None = None
        self._submitted = time.perf_counter()
        self._loaded = self._submitted
        self._started: float | None = None

    def mark_loaded(self, link: Link, sequence: Sequence) -> None:
        """All chunks' KV is at hand; from now on the request, as ``sequence``, waits for its first step."""
        self.sequence = sequence
        self._link = link
        self.plan = link.plan
        self._loaded = time.perf_counter()

    def mark_lost(self) -> None:
        """A chunk's KV did not come after all: the request is loaded again, before anything came of it."""
        self.sequence = self._link = self.plan = self._started = None
        self.lost_before = True

    def mark_started(self) -> None:
        """A step with its tokens begins."""
        if self._started is None:
            self._started = time.perf_counter()

    def linked(self) -> LinkPlan | None:
        """By what plan its prompt was computed; None when this was asked before, and for requests that explain."""
        if self._answering or self.explains:
            return None
        self._answering = True
        return self.plan

    def collector(self, prompt: Prompt) -> LogprobCollector | None:
        """What collects the log probabilities of ``prompt``, the request's as it was arranged, if they are wanted."""
        return None

    def usage(self, output_tokens: int = 0) -> Usage:
        """What became of the prompt's tokens so far; none before the first step."""
        plan = self.plan
        if self._started is None or plan is None:
            return Usage(0, 0, 0)
        recomputed = plan.recomputed_tokens
        if self.sequence is not None and self.sequence.refinement is not None:
            recomputed = self.sequence.refinement.recomputed_tokens
        cached = plan.cached_tokens + plan.recomputed_tokens - recomputed
        return Usage(cached, recomputed, plan.fresh_tokens, output_tokens)

    def make_sequence(self, link: Link, *, layers: int) -> Sequence:
        """What the engine has to compute for this request, with ``link``, in a model of so many ``layers``."""
        plan = link.plan
        probe = QuestionProbe(layers, plan.length) if plan.policy.probes else None
        return Sequence(
            plan.prompt.tokens,
            plan.runs,
            placements=tuple(zip(plan.placements, link.kvs, strict=True)),
            most_tokens=plan.length + self.max_tokens,
            probe=probe,
            refine=None if probe else self._refinement_of(plan, layers),
            logprobs=self.collector(plan.prompt),
        )

    def relink(self, probe: QuestionProbe, *, layers: int) -> None:
        """The first pass is done: plan the second, and have the sequence compute it. Raises what the policy does."""
        assert self._link is not None
        assert self.sequence is not None
        self._link = self._link.with_attention(probe.attention)
        self.plan = self._link.plan
        self.sequence.relink(self.plan.runs, self._refinement_of(self.plan, layers))

    def _refinement_of(self, plan: LinkPlan, layers: int) -> Callable[[], Refinement] | None:
        return partial(Refinement, plan, layers, explains=self.explains) if plan.policy.refines else None

    @abstractmethod
    def accept(self, logits: Tensor) -> None:
        """The last token's ``logits`` [vocabulary] are there."""

    @abstractmethod
    def cancel(self) -> None:
        """End without a result, as the caller wished."""

    @abstractmethod
    def fail(self, error: KVLinkerError) -> None:
        """End without a result, by our fault."""
