"""Drives a policy that drops tokens between the layers, for one request; the engine calls it in
every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking.evidence import ChunkAttention, Deviations, LayerEvidence
from kvlinker.linking.plan import DroppedTokens, LinkPlan
from kvlinker.linking.policy import Policy
from kvlinker.linking.selection import Score


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
        evidence = LayerEvidence(
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
