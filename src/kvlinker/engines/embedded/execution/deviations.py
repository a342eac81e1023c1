"""Computes how far a layer's new keys and values are from the chunks', for policies that drop
tokens by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.embedded.execution.batch import SharedChunk
from kvlinker.engines.embedded.model.rotary import Rotary
from kvlinker.store.chunk_kv import LayerKV


@dataclass(frozen=True, slots=True, eq=False)
class LayerDeviations:
    """Computes how far a layer's new keys and values of a request's active tokens are from those of
    its chunks."""

    positions: NDArray[np.int64]
    """Those of the active tokens, ascending: [active]."""

    chunks: Sequence[SharedChunk]
    layers: Sequence[LayerKV]
    """The chunks' KV in this layer."""

    rotary: Rotary | None

    new: Callable[[], tuple[Tensor, Tensor]]
    """Returns key, un-rotated, and value [kv_heads, active, head_dim]. It is called where they are
    needed, maybe several times."""

    def deviation(self, part: int) -> NDArray[np.float32]:
        """Return the deviation as ``Deviations.deviation`` specifies it; tokens of no chunk have
        none."""
        found = np.zeros(len(self.positions), dtype=np.float32)
        for chunk, layer in zip(self.chunks, self.layers, strict=True):
            first, last = np.searchsorted(
                self.positions, [chunk.start + chunk.first, chunk.start + chunk.last]
            )
            if first == last:
                continue
            positions = torch.from_numpy(self.positions[first:last])
            new = self.new()[part][:, first:last]
            if part == 0 and self.rotary is not None:
                rotated = torch.empty_like(new, memory_format=torch.contiguous_format)
                distances = (positions - chunk.start).to(new.device)
                self.rotary.rotate(new, *self.rotary.at(distances), out=rotated)
                new = rotated
            stored = (layer.key, layer.value)[part][:, positions - chunk.start].to(new.device)
            squares = (new.float() - stored.float()).square_().sum(dim=(0, 2))
            found[first:last] = squares.cpu().numpy()
        return found
