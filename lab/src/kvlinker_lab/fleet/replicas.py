"""Simulated replicas: the chunks in their memory and on their disk, and the seconds of a prompt
there."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Costs:
    """The seconds of a replica: ``link`` for a prompt whose chunks are all in memory, ``chunk`` for
    each chunk that is computed, ``load`` for each that is loaded from its disk, and ``answer`` from
    the first to the last byte of an answer. A replica begins other answers meanwhile. ``busy`` is
    the share by which a prompt takes longer for each answer under way."""

    link: float
    chunk: float
    load: float = 0.0
    answer: float = 2.0
    busy: float = 0.0


@dataclass(slots=True)
class Replica:
    """One replica: chunks that memory evicts stay on disk, as they were written there, too."""

    room: int
    disk_room: int = 0
    memory: OrderedDict[int, None] = field(default_factory=OrderedDict)
    disk: OrderedDict[int, None] = field(default_factory=OrderedDict)
    changed: set[int] = field(default_factory=set)
    """The chunks whose place has changed since the last report."""

    free_at: float = 0.0
    answering: int = 0
    """The answers that have begun."""

    def use(self, chunks: Iterable[int]) -> tuple[int, int]:
        """Bring chunks into memory, and return how many were computed, and how many loaded."""
        computed = loaded = 0
        for chunk in chunks:
            if chunk not in self.memory:
                loaded += chunk in self.disk
                computed += chunk not in self.disk
                self.changed.add(chunk)
            self._keep(self.memory, chunk, self.room)
            if self.disk_room:
                self._keep(self.disk, chunk, self.disk_room)
        return computed, loaded

    def lose(self) -> None:
        """Lose everything, as a machine that ends does."""
        self.changed |= self.memory.keys() | self.disk.keys()
        self.memory.clear()
        self.disk.clear()
        self.answering = 0

    def _keep(self, place: OrderedDict[int, None], chunk: int, room: int) -> None:
        place[chunk] = None
        place.move_to_end(chunk)
        while len(place) > room:
            self.changed.add(place.popitem(last=False)[0])


class Fleet:
    """All replicas, those that get no requests included."""

    def __init__(self, size: int, room: int, disk_room: int = 0) -> None:
        self.replicas: Sequence[Replica] = [Replica(room, disk_room) for _ in range(size)]
        self.alive = np.ones(size, dtype=bool)
        self.waiting = np.zeros(size, dtype=np.int64)
        """Each replica's requests without a first byte."""

    def copies(self) -> float:
        """Return in how many memories a chunk is that is in any, in the mean."""
        found = Counter(chunk for replica in self.replicas for chunk in replica.memory)
        return found.total() / max(1, len(found))
