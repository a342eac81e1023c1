"""Policies that drop tokens between layers: what they are shown, and what became of their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvlinker.engine.observation import ChunkWatch
from kvlinker.linking.plan import LinkPlan
from kvlinker.linking.policy import Policy
from kvlinker.linking.selection import Score
from kvlinker.prompt.segments import Prompt


class Deviations(Protocol):
    """How a layer's newly computed keys and values of a request's active tokens differ from the placed ones."""

    def deviation(self, part: int) -> NDArray[np.float32]:
        """Squared L2 distance of new and placed key (``part`` 0) or value (1), over all heads: [active]."""
        ...


@dataclass(frozen=True, slots=True)
class StepEvidence:
    """``LayerEvidence`` of one part of a policy in one layer of a step."""

    prompt: Prompt
    layer: int
    layers: int
    positions: NDArray[np.int64]
    cached: NDArray[np.bool_]
    selected: int
    kv: Deviations
    rows: NDArray[np.int64]
    """Where these tokens stand among those of ``kv``."""
    watch: ChunkWatch | None

    shown: list[Score] | None
    """Where what was asked for is noted, if it is."""

    def key_deviation(self) -> NDArray[np.float32]:
        return self._deviation("key_deviation", 0)

    def value_deviation(self) -> NDArray[np.float32]:
        return self._deviation("value_deviation", 1)

    def chunk_attention(self) -> NDArray[np.float32]:
        if self.watch is None:
            raise RuntimeError("a policy that looks at the question's attention on chunks must say that it watches")
        self.watch.want(self.layer)
        attention = self.watch.attention
        if self.shown is not None and len(attention):
            self.shown.append(Score("chunk_attention", attention[-1], layer=self.layer - 1))
        return attention

    def _deviation(self, name: str, part: int) -> NDArray[np.float32]:
        deviation = np.where(self.cached, self.kv.deviation(part)[self.rows], np.float32(0))
        if self.shown is not None:
            self.shown.append(Score(name, deviation[self.cached], self.positions[self.cached], self.layer))
        return deviation


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the policies that are joined: ``active`` [length], the cached tokens that it still wants."""

    policy: Policy
    active: NDArray[np.bool_]
    selected: int


class Refinement:
    """One request's way through the layers under a policy that refines. All its tokens are computed in one step."""

    def __init__(self, plan: LinkPlan, layers: int, *, explains: bool = False) -> None:
        """``explains``: keep what the policy is shown."""
        self._prompt = plan.prompt
        self._layers = layers
        self._parts = [
            _Part(policy, selection.copy(), int(selection.sum()))
            for policy, selection in zip(plan.policy.parts, plan.selections, strict=True)
        ]
        self._computed = plan.recomputed_tokens
        self.watch = ChunkWatch(plan.prompt.spans, plan.length) if plan.policy.watches else None
        self.dropped: list[tuple[int, NDArray[np.int64]]] = []
        """(first layer without them, positions), layers ascending."""
        self._shown: list[Score] | None = [] if explains else None
        self.error: Exception | None = None
        """What a policy raised, if one did; its tokens all stay then, for the sake of the batch."""

    def keep(self, layer: int, positions: NDArray[np.int64], kv: Deviations) -> NDArray[np.bool_]:
        """Which of the ``positions`` stay; ``kv`` is theirs."""
        cached = self._prompt.cached[positions]
        kept: NDArray[np.bool_] = ~cached | (
            positions == len(self._prompt) - 1
        )  # the prompt's last token gives the answer
        for part in self._parts:
            if part.policy.refines and part.policy.refined_layer in (None, layer):
                self._ask(part, layer, positions, cached, kv)
            kept |= part.active[positions]
        if not kept.all():
            self.dropped.append((layer, positions[~kept]))
        return kept

    @property
    def shown(self) -> tuple[Score, ...]:
        """The figures that policies asked for."""
        return tuple(self._shown or ())

    @property
    def recomputed_tokens(self) -> int:
        """Cached tokens that were computed again, averaged over the model's layers."""
        spared = sum(len(positions) * (self._layers - layer) for layer, positions in self.dropped)
        return round(self._computed - spared / self._layers)

    def _ask(
        self, part: _Part, layer: int, positions: NDArray[np.int64], cached: NDArray[np.bool_], kv: Deviations
    ) -> None:
        mine = np.flatnonzero(~cached | part.active[positions])
        evidence = StepEvidence(
            prompt=self._prompt,
            layer=layer,
            layers=self._layers,
            positions=positions[mine],
            cached=cached[mine],
            selected=part.selected,
            kv=kv,
            rows=mine,
            watch=self.watch,
            shown=self._shown,
        )
        try:
            stay = part.policy.refine(evidence)
            if stay is None:
                return
            stay = np.asarray(stay, dtype=np.bool_)
            if stay.shape != mine.shape:
                raise ValueError(f"refine returned shape {stay.shape} for {len(mine)} tokens")
        except Exception as error:
            self.error = error
            return
        part.active[evidence.positions[~stay]] = False
