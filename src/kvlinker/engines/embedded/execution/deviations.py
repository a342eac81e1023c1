"""Computes how far a layer's new keys and values are from the chunks', for policies that drop
tokens by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.embedded.execution.batch import SharedChunk
from kvlinker.engines.embedded.model.rotary import Rotary
from kvlinker.store.chunk_kv import LayerKV


class LayerDeviations:
    """Computes how far a layer's new keys and values of a request's active tokens are from those of
    its chunks."""

    def __init__(
        self,
        positions: NDArray[np.int64],
        chunks: Sequence[SharedChunk],
        layers: Sequence[LayerKV],
        rotary: Rotary | None,
        *,
        new: Callable[[], tuple[Tensor, Tensor]],
    ) -> None:
        """``positions`` [active], ascending, are the active tokens'; ``layers`` the chunks' KV in
        this layer. ``new`` computes key, un-rotated, and value [kv_heads, active, head_dim]; it is
        called when they are first needed."""
        self._positions = positions
        self._chunks = chunks
        self._layers = layers
        self._rotary = rotary
        self._new = cache(new)

    def deviation(self, part: int) -> NDArray[np.float32]:
        """Return the deviation as ``Deviations.deviation`` specifies it; tokens of no chunk have
        none."""
        found = np.zeros(len(self._positions), dtype=np.float32)
        for chunk, layer in zip(self._chunks, self._layers, strict=True):
            first, last = np.searchsorted(
                self._positions, [chunk.start + chunk.first, chunk.start + chunk.last]
            )
            if first == last:
                continue
            positions = torch.from_numpy(self._positions[first:last])
            new = self._new()[part][:, first:last]
            if part == 0 and self._rotary is not None:
                rotated = torch.empty_like(new, memory_format=torch.contiguous_format)
                distances = (positions - chunk.start).to(new.device)
                self._rotary.rotate(new, *self._rotary.at(distances), out=rotated)
                new = rotated
            stored = (layer.key, layer.value)[part][:, positions - chunk.start].to(new.device)
            squares = (new.float() - stored.float()).square_().sum(dim=(0, 2))
            found[first:last] = squares.cpu().numpy()
        return found
