"""The cost of tokens, counted from the model's shape: memory of their KV, and arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

LONG_CHUNK = 4096
"""The tokens of a chunk that is long: what is kept grows evenly from there on."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention: counts of heads, and values per head."""

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def values_per_token(self) -> int:
        """The number of values in one token's KV in this layer."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    @property
    def operations_per_pair(self) -> int:
        """The floating point operations per query and key that it sees."""
        return 2 * self.query_heads * (self.key_dim + self.value_dim)


def kv_bytes_per_token(layers: Sequence[AttentionShape], dtype: torch.dtype) -> int:
    """Count the bytes of one token's KV over all layers."""
    return sum(layer.values_per_token for layer in layers) * dtype.itemsize


class ChunkSize(NamedTuple):
    """The bytes that are stored of chunks, as computed: those for each token, and more for each
    chunk where layers keep the effect of all of its tokens on a state."""

    per_token: int
    per_chunk: int

    @classmethod
    def of(cls, kv_bytes: Callable[[int], int]) -> Self:
        """Return the size of long chunks, of which ``kv_bytes`` counts the bytes for a number of
        tokens."""
        once, twice = kv_bytes(LONG_CHUNK), kv_bytes(2 * LONG_CHUNK)
        per_token = (twice - once) // LONG_CHUNK
        return cls(per_token, once - per_token * LONG_CHUNK)


def count_weights(model: Any) -> int:
    """Count a transformers model's weights, without embeddings and the output head."""
    return sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if "embed" not in name and "lm_head" not in name
    )


class CostModel:
    """Counts floating point operations: 2 per weight and token, 4 · heads · head_dim per query and
    key that it sees.

    Embeddings and the output head are left out, all experts of a mixture are counted, and so are
    all earlier keys in layers with a sliding window. A model without attention counts as one layer.
    """

    def __init__(self, weights: int, layers: Sequence[AttentionShape]) -> None:
        """``weights`` is the number of weights, as ``count_weights`` counts them."""
        self._per_key = [layer.operations_per_pair for layer in layers] or [0]
        self._per_token = 2 * weights / len(self._per_key)

    @property
    def per_token(self) -> float:
        """Operations per token over all layers, without attention."""
        return self._per_token * len(self._per_key)

    @property
    def per_pair(self) -> float:
        """Operations per query and key that it sees, over all layers."""
        return float(sum(self._per_key))

    def flops(self, masks: Sequence[NDArray[np.bool_]]) -> float:
        """Count the operations of computing, in each layer, the positions where its mask [length]
        is true, each seeing all before it."""
        return sum(self._layer_flops(layer, mask) for layer, mask in enumerate(masks))

    def _layer_flops(self, layer: int, mask: NDArray[np.bool_]) -> float:
        positions = np.flatnonzero(mask)
        seen = int((positions + 1).sum())
        return self._per_token * len(positions) + self._per_key[layer] * seen
