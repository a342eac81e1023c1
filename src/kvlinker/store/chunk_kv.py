"""The KV of one chunk, as the engine makes it and the store keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvlinker.types.chunk_scores import ChunkScores


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's KV: ``key`` without rotary embedding, ``value`` as computed; [kv_heads, tokens, head_dim] each."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunkKV:
    """All layers' KV of one chunk, contiguous, never modified after creation. On the CPU, but for what the device tier
    gives.

    ``scores``: what attention showed while it was computed, if that was collected.
    """

    layers: Sequence[LayerKV]
    scores: ChunkScores | None = None

    @property
    def tokens(self) -> int:
        return int(self.layers[0].key.shape[1])

    @property
    def nbytes(self) -> int:
        scores = 0 if self.scores is None else self.scores.nbytes
        return scores + sum(layer.key.nbytes + layer.value.nbytes for layer in self.layers)
