"""Copies layers of chunks to a device's memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvlinker.store.chunk_kv import LayerKV
from kvlinker.store.memory.lane import Arrival, CopyLane


def begin_copies(lane: CopyLane, layers: Sequence[LayerKV]) -> tuple[tuple[LayerKV, ...], Arrival]:
    """Begin to copy the layers, which lie in the host's memory, and return where they will be, and
    when they are there. Keys and values that lie side by side will do so there."""
    copies: list[LayerKV] = []
    pairs: list[tuple[Tensor, Tensor]] = []
    for layer in layers:
        if layer.is_joined:
            joined = layer.joined
            room = lane.room_like(joined)
            pairs.append((room, joined))
            copies.append(LayerKV.of_joined(room, layer.key.shape[-1]))
        else:
            copy = LayerKV(lane.room_like(layer.key), lane.room_like(layer.value))
            pairs += [(copy.key, layer.key), (copy.value, layer.value)]
            copies.append(copy)

    def work() -> None:
        for room, source in pairs:
            room.copy_(source, non_blocking=True)

    return tuple(copies), lane.launch(work, keeping=pairs)
