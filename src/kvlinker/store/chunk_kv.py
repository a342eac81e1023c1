"""The KV of one chunk, as the engine makes it and the store keeps it."""

from __future__ import annotations

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
    """The KV of all layers of one chunk. Its tensors are contiguous, never modified after creation, and on the CPU,
    except for what the device tier gives.

    ``scores`` is what attention showed while the KV was computed, if that was collected.
    """

    layers: tuple[LayerKV, ...]
    scores: ChunkScores | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens of the chunk."""
        return int(self.layers[0].key.shape[1])

    @property
    def nbytes(self) -> int:
        """The bytes of all layers and of the scores."""
        scores = 0 if self.scores is None else self.scores.nbytes
        return scores + sum(layer.key.nbytes + layer.value.nbytes for layer in self.layers)

    def layer(self, index: int) -> LayerKV:
        """Return one layer, as ``ArrivingKV.layer`` does. Raises IndexError."""
        return self.layers[index]
