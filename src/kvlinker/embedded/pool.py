"""The KV pool: the KV of all tokens that running requests computed, in contiguous ranges of slots."""

from __future__ import annotations

import math
import mmap
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlinker.embedded.model.anatomy import LayerShape

MOVED_TOGETHER = 1024
"""The number of slots that are copied at once when a range moves."""

Move = tuple[int, int, int]
"""(from, to, size): slots whose KV is to be copied within the pool."""


@dataclass(slots=True)
class SlotRange:
    """Slots [start, start + size), which hold tokens of one request, or of all answers to one prompt. Only the
    allocator changes it."""

    start: int
    size: int
    users: int = 1
    """The number of sequences that see it."""

    @property
    def end(self) -> int:
        return self.start + self.size


class SlotAllocator:
    """Hands out contiguous ranges of a fixed number of slots, best fit first.

    It knows no KV: what has to be copied is noted in ``moves``, to be done in order before anything is computed.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._ranges: list[SlotRange] = []  # ascending, disjoint
        self._moves: list[Move] = []

    @property
    def used(self) -> int:
        """The number of slots that are handed out."""
        return sum(held.size for held in self._ranges)

    @property
    def free(self) -> int:
        """The number of slots that are not handed out, contiguous or not."""
        return self.slots - self.used

    def allocate(self, size: int) -> SlotRange | None:
        """Return a range of ``size`` slots from the smallest gap that holds it, after closing all gaps if none does;
        None where fewer slots are free."""
        fitting = [(gap_size, start) for start, gap_size in self._gaps() if gap_size >= size]
        if not fitting:
            if self.free < size:
                return None
            self.compact()
            fitting = [(gap_size, start) for start, gap_size in self._gaps()]
        allocated = SlotRange(min(fitting)[1], size)
        insort(self._ranges, allocated, key=lambda held: held.start)
        return allocated

    def grow(self, held: SlotRange, size: int) -> SlotRange | None:
        """Return ``held`` with ``size`` slots, or a range elsewhere that takes its place; None where there is no
        room."""
        if self._extend(held, size):
            return held
        if self.free >= size - held.size:
            self.compact()
            if self._extend(held, size):
                return held
        moved = self.allocate(size)
        if moved is not None:
            self.copy(held.start, moved.start, held.size)
            self.release(held)
        return moved

    def split(self, held: SlotRange, size: int) -> SlotRange:
        """Return the first ``size`` slots of ``held``, fewer than all, as a range of their own; ``held`` keeps the
        rest."""
        assert 0 < size < held.size
        head = SlotRange(held.start, size)
        held.start += size
        held.size -= size
        insort(self._ranges, head, key=lambda other: other.start)
        return head

    def share(self, held: SlotRange) -> SlotRange:
        """Return ``held``, which has one user more now: nobody may write to it any more, and it cannot grow."""
        held.users += 1
        return held

    def release(self, held: SlotRange) -> None:
        """Take the range back, once its last user releases it."""
        held.users -= 1
        if not held.users:
            self._ranges = [other for other in self._ranges if other is not held]

    def compact(self) -> None:
        """Close all gaps."""
        next_free = 0
        for held in self._ranges:
            if held.start != next_free:
                self.copy(held.start, next_free, held.size)
                held.start = next_free
            next_free = held.end

    def copy(self, source: int, target: int, size: int) -> None:
        """Note that the KV of ``size`` slots is to be copied."""
        self._moves.append((source, target, size))

    def take_moves(self) -> tuple[Move, ...]:
        """Return what is to be copied, in order; it counts as done."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def check_integrity(self) -> None:
        """Raises AssertionError unless the ranges are ordered, disjoint and inside the pool."""
        end = 0
        for held in self._ranges:
            assert held.size > 0, held
            assert held.users > 0, held
            assert held.start >= end, (held, end)
            end = held.end
        assert end <= self.slots, (end, self.slots)

    def _extend(self, held: SlotRange, size: int) -> bool:
        """Grow ``held`` in place, if the slots behind it are free."""
        following = next(index for index, other in enumerate(self._ranges, 1) if other is held)
        limit = self._ranges[following].start if following < len(self._ranges) else self.slots
        if held.start + size > limit:
            return False
        held.size = max(held.size, size)
        return True

    def _gaps(self) -> list[tuple[int, int]]:
        """(start, size) of all gaps, ascending."""
        gaps = []
        end = 0
        for held in self._ranges:
            if held.start > end:
                gaps.append((end, held.start - end))
            end = held.end
        if end < self.slots:
            gaps.append((end, self.slots - end))
        return gaps


class KVPool:
    """Keys (with rotary embedding) and values of all layers: per layer [kv_heads, slots, head_dim] each.

    A range of slots is a strided view that attention reads without a copy.
    """

    def __init__(self, layers: Sequence[LayerShape], slots: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.slots = slots
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for layer in layers:
            self.keys.append(_zeros((layer.kv_heads, slots, layer.key_dim), dtype, device))
            self.values.append(_zeros((layer.kv_heads, slots, layer.value_dim), dtype, device))

    def move(self, source: int, target: int, size: int) -> None:
        """Copy ``size`` slots from ``source`` to ``target``; the two may overlap when moving down."""
        for tensor in (*self.keys, *self.values):
            for offset in range(0, size, MOVED_TOGETHER):
                length = min(MOVED_TOGETHER, size - offset)
                moved = tensor[:, source + offset : source + offset + length].clone()
                tensor[:, target + offset : target + offset + length] = moved


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros: attention needs finite numbers even in slots that nobody sees. On the CPU, memory is taken as it is
    written to."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
