"""Copies layers of chunks to a device's memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvlinker.store.chunk_kv import LayerKV
from kvlinker.store.memory.lane import Arrival, CopyLane


def begin_copies(lane: CopyLane, layers: Sequence[LayerKV]) -> tuple[tuple[LayerKV, ...], Arrival]:
    """Begin to copy the layers, which lie in the host's memory, and return where they will be, and
    when they are there. Keys and values that lie side by side will do so there."""
    pairs: list[tuple[Tensor, Tensor]] = []

    def room_for(part: Tensor) -> Tensor:
        room = lane.room_like(part)
        pairs.append((room, part))
        return room

    copies = tuple(layer.moved(room_for) for layer in layers)

    def work() -> None:
        for room, source in pairs:
            room.copy_(source, non_blocking=True)

    return copies, lane.launch(work, keeping=pairs)
