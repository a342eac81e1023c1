"""The KV pool: the KV of all tokens that requests computed, and which of its slots are taken."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.base.errors import ModelLoadError
from kvlinker.engines.embedded.model.anatomy import LayerShape, keeping, kept_by
from kvlinker.store.chunk_kv import ChunkKV, LayerKV
from kvlinker.store.loading.arriving import KV


class SlotSpan(NamedTuple):
    """The ``size`` slots of the pool from ``slot`` on."""

    slot: int
    size: int

    @property
    def end(self) -> int:
        return self.slot + self.size


def slots_of(spans: Sequence[SlotSpan]) -> NDArray[np.int64]:
    """Return the numbers of all slots of these spans, in order."""
    if len(spans) == 1:
        ((slot, size),) = spans
        return np.arange(slot, slot + size)
    return np.concatenate([np.arange(slot, slot + size) for slot, size in spans])


def cut(spans: Iterable[SlotSpan], begin: int, end: int) -> list[SlotSpan]:
    """Return the slots [begin, end) of all slots of these spans."""
    found = []
    for span in spans:
        slot, size = span
        if begin <= 0 < size <= end:
            found.append(span)
        elif begin < size and end > 0:
            first, last = max(begin, 0), min(end, size)
            if first < last:
                found.append(SlotSpan(slot + first, last - first))
        begin, end = begin - size, end - size
    return found


def joined(spans: Iterable[SlotSpan]) -> list[SlotSpan]:
    """Return the same slots in the same order, in as few spans as there can be."""
    found: list[SlotSpan] = []
    for span in spans:
        if found and found[-1].end == span.slot:
            span = SlotSpan(found[-1].slot, found.pop().size + span.size)
        found.append(span)
    return found


_size = attrgetter("size")


class SlotAllocator:
    """Hands out a fixed number of slots, and counts the users of each: what is computed once may be
    seen by many."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._users = np.zeros(slots, dtype=np.int32)

    @property
    def free(self) -> int:
        """The number of free slots."""
        return self.slots - self.used

    @property
    def used(self) -> int:
        """The number of slots in use."""
        return int(np.count_nonzero(self._users))

    def free_without(self, spans: Iterable[SlotSpan]) -> int:
        """Return the number of slots that would be free if each of these spans had one user
        less."""
        users = self._users.copy()
        for span in spans:
            users[span.slot : span.end] -= 1
        return self.slots - int(np.count_nonzero(users))

    def allocate(self, size: int) -> tuple[SlotSpan, ...] | None:
        """Return ``size`` slots with one user: one span from the smallest gap that holds them, or,
        where none does, several from the largest gaps on; None where fewer are free."""
        gaps = self._gaps()
        if sum([gap.size for gap in gaps]) < size:
            return None
        fitting = [gap for gap in gaps if gap.size >= size]
        spans = []
        for gap in [min(fitting, key=_size)] if fitting else sorted(gaps, key=_size, reverse=True):
            spans.append(SlotSpan(gap.slot, min(size, gap.size)))
            size -= spans[-1].size
            if not size:
                break
        self.share(spans)
        return tuple(spans)

    def extend(self, span: SlotSpan, size: int) -> SlotSpan:
        """Return ``span`` with up to ``size`` more slots, as far as those behind it are free."""
        behind = self._users[span.end : span.end + size]
        taken = np.flatnonzero(behind)
        more = SlotSpan(span.end, int(taken[0]) if taken.size else len(behind))
        self.share([more])
        return SlotSpan(span.slot, span.size + more.size)

    def share(self, spans: Iterable[SlotSpan]) -> None:
        """Count one more user of these slots."""
        for span in spans:
            self._users[span.slot : span.end] += 1

    def release(self, spans: Iterable[SlotSpan]) -> None:
        """Count one user of these slots less; those without any are free again."""
        for span in spans:
            self._users[span.slot : span.end] -= 1

    def users(self, spans: Iterable[SlotSpan]) -> NDArray[np.int32]:
        """Return the number of users of every slot of these spans, in order."""
        return np.concatenate(
            [self._users[:0], *(self._users[span.slot : span.end] for span in spans)]
        )

    def check_integrity(self, held: Sequence[SlotSpan]) -> None:
        """Raises AssertionError unless each slot has a user for each of these spans that it is in,
        and no others."""
        expected = np.zeros_like(self._users)
        for span in held:
            assert 0 <= span.slot < span.end <= self.slots, span
            expected[span.slot : span.end] += 1
        assert np.array_equal(expected, self._users)

    def _gaps(self) -> list[SlotSpan]:
        """Return all gaps, ascending."""
        edges = np.flatnonzero(np.diff(self._users == 0, prepend=False, append=False))
        return [SlotSpan(int(begin), int(end - begin)) for begin, end in edges.reshape(-1, 2)]


class KVPool:
    """Keys (with rotary embedding) and values of all layers that keep any: per layer [kv_heads,
    slots, head_dim] each, where they are latents with the shared key side by side. Where a layer
    has an indexer, what that keeps, without rotary embedding: [1, slots, dim].

    A span of slots is a strided view that attention reads without a copy. Where no layer keeps any,
    slots count the tokens of sequences, and hold nothing.
    """

    def __init__(
        self, layers: Sequence[LayerShape], slots: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots = slots
        self.kept_by = kept_by(layers)
        """For each layer, the index in ``keys`` of the one that it attends to."""

        self.dtype = dtype
        self.device = device
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.indices: list[Tensor | None] = []
        for layer in keeping(layers):
            if layer.latents is None:
                key, value = (
                    _zeros((layer.kv_heads, slots, dim), dtype, device)
                    for dim in (layer.key_dim, layer.value_dim)
                )
            else:
                joined = _zeros((1, slots, layer.key_dim + layer.value_dim), dtype, device)
                key, value = joined[..., : layer.key_dim], joined[..., layer.key_dim :]
            self.keys.append(key)
            self.values.append(value)
            dim = None if layer.indexer is None else layer.indexer.dim
            self.indices.append(None if dim is None else _zeros((1, slots, dim), dtype, device))

    @property
    def layers(self) -> tuple[LayerKV, ...]:
        """The KV of all slots, of each layer that keeps any."""
        return tuple(map(LayerKV, self.keys, self.values, self.indices))

    def read(self, spans: Sequence[SlotSpan]) -> ChunkKV:
        """Return a copy, on the CPU, of what these slots hold: keys with the rotary embedding of
        their positions."""

        def copied(whole: Tensor) -> Tensor:
            return torch.cat([whole[:, span.slot : span.end] for span in spans], dim=1).cpu()

        return ChunkKV(
            tuple(LayerKV.of_parts([copied(part) for part in each.parts]) for each in self.layers)
        )

    def is_finite(self, spans: Sequence[SlotSpan]) -> bool:
        """Return whether the last layer's KV in these slots has no NaN and no infinity: a token
        that had some in a layer before has some there, too."""
        return all(
            bool(whole[:, span.slot : span.end].isfinite().all())
            for each in self.layers[-1:]
            for whole in (each.key, each.value)
            for span in spans
        )

    def clear(self, slots: NDArray[np.int64]) -> None:
        """Write zeros to these slots."""
        indices = torch.from_numpy(slots).to(self.device)
        for each in self.layers:
            for whole in each.parts:
                whole[:, indices] = 0

    def write(self, kv: KV, first: int, last: int, slots: NDArray[np.int64]) -> None:
        """Copy the tokens [first, last) of what ``read`` returned into as many ``slots``."""
        indices = torch.from_numpy(slots)
        for index, each in enumerate(self.layers):
            layer = kv.layer(index)
            assert layer is not None, "all layers have to be there"
            for whole, part in zip(each.parts, layer.parts, strict=True):
                whole[:, indices.to(whole.device)] = part[:, first:last].to(whole.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros: attention needs finite numbers even in slots that no query sees. On the CPU,
    memory is allocated when it is written to. Raises ModelLoadError where there is none."""
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype).view(shape)
    except (OSError, OverflowError, torch.OutOfMemoryError) as error:
        raise ModelLoadError(
            f"There is no memory for the KV of {shape[1]:,} tokens, of which the keys or values of"
            f" one layer take {nbytes / 2**30:,.1f} GiB. Lower kv_slots, or free memory."
        ) from error
