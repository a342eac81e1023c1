"""Drives a policy that drops tokens between the layers, for one request; the engine calls it in
every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking.plan import DroppedTokens, LinkPlan
from kvlinker.linking.policy import Policy
from kvlinker.linking.selection import Score
from kvlinker.prompting.segments import Prompt


class Deviations(Protocol):
    """The deviation of a layer's newly computed keys and values from the cached ones, for a
    request's active tokens."""

    def deviation(self, part: int) -> NDArray[np.float32]:
        """Return the squared L2 distance of new and cached key (``part`` 0) or value (1), over all
        heads: [active]."""


class ChunkAttention(Protocol):
    """The question's attention on every chunk, collected layer by layer for as long as a policy
    asks for it."""

    @property
    def attention(self) -> NDArray[np.float32]:
        """The attention: [layers so far, chunks], summed over the question's tokens, mean over
        heads."""

    def want(self, layer: int) -> None:
        """Ask for this layer's attention, too. Collecting ends with the first layer that no policy
        asks for."""


class Refinement:
    """Asks a policy in each layer which tokens to keep. All of the prompt's tokens are computed in
    one step.

    If the policy raises, all its tokens are kept, so that the batch is not affected, and ``error``
    is the exception.
    """

    def __init__(
        self,
        plan: LinkPlan,
        layers: int,
        *,
        watch: ChunkAttention | None = None,
        explains: bool = False,
    ) -> None:
        """``layers`` is the number of the model's layers. ``watch`` is required where the policy
        needs ``chunk_attention``. With ``explains``, the figures that the policy asks for are kept
        in ``shown``."""
        self._prompt = plan.prompt
        self._layers = layers
        self._parts = [
            _Part(policy, selection.copy(), int(selection.sum()))
            for policy, selection in zip(plan.policy.parts, plan.selections, strict=True)
        ]
        self._selected = plan.recomputed_tokens
        self._droppable = plan.prompt.cached & plan.computed
        self._watch = watch
        self._dropped: list[DroppedTokens] = []
        self._shown: list[Score] | None = [] if explains else None
        self.error: Exception | None = None
        """The exception that the policy raised; None if it raised none."""

    @property
    def layers(self) -> int:
        """The number of the model's layers."""
        return self._layers

    @property
    def dropped(self) -> Sequence[DroppedTokens]:
        """The tokens that were dropped so far, layers ascending."""
        return self._dropped

    @property
    def shown(self) -> tuple[Score, ...]:
        """The figures that the policy asked for, in order; empty unless it is to be explained."""
        return tuple(self._shown or ())

    @property
    def recomputed_tokens(self) -> int:
        """The number of cached tokens that were computed again, averaged over the model's
        layers."""
        spared = sum(len(positions) * (self._layers - layer) for layer, positions in self._dropped)
        return round(self._selected - spared / self._layers)

    def keep(self, layer: int, positions: NDArray[np.int64], kv: Deviations) -> NDArray[np.bool_]:
        """Ask the policy in this layer, and return which tokens it keeps from its attention on: a
        mask, [active].

        ``positions`` [active], ascending, are the tokens that are still computed; ``kv`` has the
        deviations of the same tokens. Tokens that the plan does not compute are kept: an earlier
        request had computed them, but they are gone.
        """
        cached = self._droppable[positions]
        kept: NDArray[np.bool_] = ~cached | (
            positions == len(self._prompt) - 1
        )  # the last token gives the answer
        for part in self._parts:
            if part.policy.needs.refines_in(layer):
                self._ask(part, layer, positions, cached, kv)
            kept |= part.active[positions]
        if not kept.all():
            self._dropped.append((layer, positions[~kept]))
        return kept

    def _ask(
        self,
        part: _Part,
        layer: int,
        positions: NDArray[np.int64],
        cached: NDArray[np.bool_],
        kv: Deviations,
    ) -> None:
        mine = np.flatnonzero(~cached | part.active[positions])
        evidence = _StepEvidence(
            prompt=self._prompt,
            layer=layer,
            layers=self._layers,
            positions=positions[mine],
            cached=cached[mine],
            selected=part.selected,
            kv=kv,
            rows=mine,
            watch=self._watch,
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


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the policies that are joined. ``active`` [length] masks the cached tokens that it
    still computes."""

    policy: Policy
    active: NDArray[np.bool_]
    selected: int


@dataclass(frozen=True, slots=True)
class _StepEvidence:
    """The ``LayerEvidence`` of one part of a policy in one layer of a step. ``rows`` are its
    tokens' indices in ``kv``."""

    prompt: Prompt
    layer: int
    layers: int
    positions: NDArray[np.int64]
    cached: NDArray[np.bool_]
    selected: int
    kv: Deviations
    rows: NDArray[np.int64]
    watch: ChunkAttention | None
    shown: list[Score] | None

    def key_deviation(self) -> NDArray[np.float32]:
        return self._deviation("key_deviation", 0)

    def value_deviation(self) -> NDArray[np.float32]:
        return self._deviation("value_deviation", 1)

    def chunk_attention(self) -> NDArray[np.float32]:
        if self.watch is None:
            raise RuntimeError(
                "a policy that looks at the question's attention on chunks must say that it"
                " needs it"
            )
        self.watch.want(self.layer)
        attention = self.watch.attention
        if self.shown is not None and len(attention):
            self.shown.append(Score("chunk_attention", attention[-1], layer=self.layer - 1))
        return attention

    def _deviation(self, name: str, part: int) -> NDArray[np.float32]:
        deviation = np.where(self.cached, self.kv.deviation(part)[self.rows], np.float32(0))
        if self.shown is not None:
            self.shown.append(
                Score(name, deviation[self.cached], self.positions[self.cached], self.layer)
            )
        return deviation
