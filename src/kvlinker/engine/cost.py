"""Arithmetic that a prompt costs, counted from the model's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlinker.embedded.model.anatomy import LayerShape


class CostModel:
    """Floating point operations: 2 per weight and token, and 4 · heads · head_dim per query and key that it sees.

    Embeddings and the output head are left out, all experts of a mixture are counted, and so are all earlier keys in
    layers with a sliding window.
    """

    def __init__(self, model: Any, layers: Sequence[LayerShape]) -> None:
        weights: int = sum(
            weight.numel() for name, weight in model.named_parameters() if "embed" not in name and "lm_head" not in name
        )
        self._per_token = 2 * weights / len(layers)
        self._per_key = [2 * layer.query_heads * (layer.key_dim + layer.value_dim) for layer in layers]

    @property
    def per_token(self) -> float:
        """Over all layers, without attention."""
        return self._per_token * len(self._per_key)

    @property
    def per_pair(self) -> float:
        """Of a query and a key that it sees, over all layers."""
        return float(sum(self._per_key))

    def flops(self, masks: Sequence[NDArray[np.bool_]]) -> float:
        """Of computing the positions where ``masks`` (one per layer, [length]) are true, each seeing all before it."""
        return sum(self._layer_flops(layer, mask) for layer, mask in enumerate(masks))

    def _layer_flops(self, layer: int, mask: NDArray[np.bool_]) -> float:
        positions = np.flatnonzero(mask)
        seen = int((positions + 1).sum())
        return self._per_token * len(positions) + self._per_key[layer] * seen
