"""Policies that drop tokens between layers: what they are shown, and what became of their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.linking.policy import Policy


@dataclass(frozen=True, slots=True)
class KVEvidence:
    """``LayerEvidence`` from keys and values [kv_heads, active, head_dim], newly computed and as placed."""

    positions: NDArray[np.int64]
    cached: NDArray[np.bool_]
    new_key: Tensor
    placed_key: Tensor
    new_value: Tensor
    placed_value: Tensor

    def key_deviation(self) -> Tensor:
        return self._deviation(self.new_key, self.placed_key)

    def value_deviation(self) -> Tensor:
        return self._deviation(self.new_value, self.placed_value)

    def _deviation(self, new: Tensor, placed: Tensor) -> Tensor:
        squared = (new.float() - placed.float()).square().sum(dim=(0, 2)).cpu()
        squared[np.flatnonzero(~self.cached)] = 0
        return squared


class Refinement:
    """One request's way through the layers under a policy that refines. All its tokens are computed in one step."""

    def __init__(self, policy: Policy, cached: NDArray[np.bool_]) -> None:
        """``cached`` [prompt length]: positions whose KV was placed."""
        self._policy = policy
        self._cached = cached
        self._dropped: list[tuple[int, int]] = []  # (first layer without them, how many)
        self._computed = 0
        self.error: Exception | None = None
        """What the policy raised, if it did; its tokens all stay then, for the sake of the batch."""

    def asked_in(self, layer: int) -> bool:
        return layer in self._policy.refine_layers

    def keep(
        self, layer: int, positions: NDArray[np.int64], new: tuple[Tensor, Tensor], placed: tuple[Tensor, Tensor]
    ) -> NDArray[np.bool_]:
        """Which of the active ``positions`` stay; ``new`` and ``placed`` are key and value at them."""
        cached = self.is_cached(positions)
        evidence = KVEvidence(positions, cached, new[0], placed[0], new[1], placed[1])
        try:
            kept = np.asarray(self._policy.refine(layer, evidence), dtype=np.bool_)
            if kept.shape != positions.shape:
                raise ValueError(f"refine returned shape {kept.shape} for {len(positions)} tokens")
        except Exception as error:
            self.error = error
            kept = np.ones(len(positions), dtype=np.bool_)
        kept = kept | ~cached | (positions >= len(self._cached) - 1)  # the prompt's last token gives the answer
        self._dropped.append((layer, int((~kept).sum())))
        return kept

    def start(self, positions: NDArray[np.int64]) -> None:
        """The first layer computes these positions."""
        self._computed = int(self.is_cached(positions).sum())

    def is_cached(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        inside = positions < len(self._cached)
        return inside & self._cached[np.where(inside, positions, 0)]

    def recomputed_tokens(self, layers: int) -> int:
        """Cached tokens that were computed again, averaged over the model's layers."""
        spared = sum(count * (layers - layer) for layer, count in self._dropped)
        return round(self._computed - spared / layers)
