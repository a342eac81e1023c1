"""Copies layers of chunks from the host's memory to the device before they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import torch

from kvlinker.store.chunk_kv import LayerKV
from kvlinker.store.loading.arriving import KV
from kvlinker.store.memory.lane import Arrival, CopyLane

AHEAD = 2
"""The layers that are copied while one is computed."""


@dataclass(slots=True)
class _Copy:
    """A copy of one layer of a chunk."""

    source: LayerKV  # kept, so that no other has its id
    copy: LayerKV

    index: int
    """Which layer it is."""

    arrival: Arrival | None
    """When it is there; None once passes need not wait for that."""

    @property
    def nbytes(self) -> int:
        return self.copy.nbytes


class LayersAhead:
    """The layers of chunks as passes read them, one pass after the other: where they are in the
    device's memory already, or copies.

    While a layer is computed, the next ones are copied on a lane of their own. A copy lasts until
    a later layer is asked for, but those of the last layers last together; or, as long as there is
    room, until a pass ends that did not need it.
    """

    def __init__(self, lane: CopyLane | None, layers: int, *, room_bytes: int = 0) -> None:
        """``lane`` leads to the device; None if its memory is the host's. ``layers`` are those that
        keep KV. Copies of up to ``room_bytes`` stay from pass to pass."""
        self._lane = lane
        self._layers = layers
        self._room_bytes = room_bytes
        self._kept: dict[int, _Copy] = {}
        self._kept_bytes = 0
        self._passing: dict[int, _Copy] = {}
        self._asked: set[int] = set()
        self._chunks: tuple[int, ...] = ()
        self._begun: set[int] = set()
        self._whole: tuple[tuple[KV, ...], list[tuple[LayerKV, ...]]] | None = None

    def begin_pass(self) -> None:
        """Drop the copies that the last pass did not use."""
        self._whole = None
        kept = ((name, each) for name, each in self._kept.items() if name in self._asked)
        self._kept = dict(kept)
        self._kept_bytes = sum(each.nbytes for each in self._kept.values())
        self._passing.clear()
        self._asked.clear()
        self._begun.clear()

    def whole(self, chunks: Sequence[KV]) -> list[tuple[LayerKV, ...]] | None:
        """Begin a pass that reads all layers of these chunks at once, and return them on the
        device, chunk by chunk; the same objects as long as passes read the same chunks. None, and
        no pass is begun, where layers have not come, or there is no room for copies of them all."""
        known = self._whole
        if known is not None and len(known[0]) == len(chunks) and all(map(is_, known[0], chunks)):
            return known[1]
        layers: dict[int, tuple[int, LayerKV]] = {}
        own: list[list[LayerKV]] = []
        for kv in chunks:
            found = [kv.layer(index) for index in range(self._layers)]
            own.append([layer for layer in found if layer is not None])
            if len(own[-1]) < len(found):
                return None
            layers.update((id(layer), (index, layer)) for index, layer in enumerate(own[-1]))
        lane = self._lane
        missing = {
            name: found
            for name, found in layers.items()
            if lane is not None and name not in self._kept and not lane.holds(found[1].key)
        }
        stay = [each for name, each in self._kept.items() if name in layers or name in self._asked]
        more = sum(layer.nbytes for _, layer in missing.values())
        if missing and sum(each.nbytes for each in stay) + more > self._room_bytes:
            return None
        self._asked.update(layers)  # whose copies are to stay
        self.begin_pass()
        if lane is not None and missing:
            try:
                copies, arrival = lane.copies([layer for _, layer in missing.values()])
            except torch.OutOfMemoryError:
                return None
            for (name, (index, layer)), copy in zip(missing.items(), copies, strict=True):
                self._kept[name] = _Copy(layer, copy, index, arrival)
                self._kept_bytes += copy.nbytes
        whole = [tuple(each if lane is None else self._arrived(lane, each)) for each in own]
        self._whole = tuple(chunks), whole
        return whole

    def layer(self, chunks: Sequence[KV], index: int) -> list[LayerKV]:
        """Return one of the layers that keep KV of these chunks, which is there, and begin to copy
        the next ones. Later computations of the calling thread find it on the device."""
        layers = [layer_of(kv, index) for kv in chunks]
        lane = self._lane
        if lane is None:
            return layers
        names = tuple(map(id, chunks))
        if names != self._chunks:
            self._chunks = names
            self._begun.clear()
        turn = range(index, min(index + 1 + AHEAD, self._layers))
        # later layers may share the KV of the last ones, and take turns in that
        stay = range(min(index, self._layers - 1 - AHEAD), turn.stop)
        for name in [name for name, each in self._passing.items() if each.index not in stay]:
            del self._passing[name]
        for ahead in turn:
            if ahead not in self._begun:
                self._begin(lane, chunks, ahead)
        self._begun.discard(index)  # its copies last until the next layer is asked for
        return self._arrived(lane, layers)

    def _begin(self, lane: CopyLane, chunks: Sequence[KV], index: int) -> None:
        """Begin to copy the layer, where it has come and is not on the device, or on its way."""
        layers = [kv.layer(index) for kv in chunks]
        missing = {
            id(layer): layer
            for layer in layers
            if layer is not None and self._copy_of(layer) is None and not lane.holds(layer.key)
        }
        if None not in layers:
            self._begun.add(index)
        if not missing:
            return
        copies, arrival = lane.copies(tuple(missing.values()))
        for source, copy in zip(missing.values(), copies, strict=True):
            each = _Copy(source, copy, index, arrival)
            if self._kept_bytes + each.nbytes <= self._room_bytes:
                self._kept[id(source)] = each
                self._kept_bytes += each.nbytes
            else:
                self._passing[id(source)] = each

    def _arrived(self, lane: CopyLane, layers: Sequence[LayerKV]) -> list[LayerKV]:
        """Return the layers on the device, and have the computation wait for them."""
        found: list[LayerKV] = []
        reached: set[int] = set()
        for layer in layers:
            each = self._copy_of(layer)
            if each is None:
                assert lane.holds(layer.key), "its copy was not begun"
                found.append(layer)
                continue
            self._asked.add(id(layer))
            if each.arrival is not None and id(each.arrival) not in reached:
                each.arrival.wait()
                reached.add(id(each.arrival))
            each.arrival = None
            found.append(each.copy)
        return found

    def _copy_of(self, layer: LayerKV) -> _Copy | None:
        return self._kept.get(id(layer)) or self._passing.get(id(layer))


def layer_of(kv: KV, index: int) -> LayerKV:
    """Return one of the layers that keep KV, which is there: its owner has left otherwise."""
    layer = kv.layer(index)
    assert layer is not None, "its owner has left"
    return layer
