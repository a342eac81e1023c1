"""Tells routers which chunks are in this server's memory, by the names that requests use."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass

from kvlinker.base.events import ChunkNamed, Event
from kvlinker.base.types.residency import ResidencyReport
from kvlinker.store import ChunkStore

MOST_NAMED = 100_000
"""The most chunks whose names are remembered; those named last stay."""

NAMES_PER_CHUNK = 8
"""The most names of one chunk; older ones go."""

KEPT_CHANGES = 100
"""The reports to which a router may refer back; one that knows less gets everything."""


@dataclass(frozen=True, slots=True)
class _Change:
    """What one report told beyond the one before."""

    resident: dict[str, tuple[str, ...]]
    gone: frozenset[str]


class Residency:
    """Follows what is in memory. Methods may be called from any thread."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._lock = threading.Lock()  # guards everything below
        self._epoch = secrets.token_hex(8)
        self._number = 0
        self._names: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()  # by chunk key
        self._told: dict[str, tuple[str, ...]] = {}
        self._changes: deque[_Change] = deque(maxlen=KEPT_CHANGES)

    def listen(self, event: Event) -> None:
        """Take note of an event; ``Events.subscribe`` takes this."""
        if isinstance(event, ChunkNamed):
            with self._lock:
                names = self._names.setdefault(event.chunk_key, OrderedDict())
                names[event.name] = None
                names.move_to_end(event.name)
                if len(names) > NAMES_PER_CHUNK:
                    names.popitem(last=False)
                self._names.move_to_end(event.chunk_key)
                if len(self._names) > MOST_NAMED:
                    self._names.popitem(last=False)

    def report(self, epoch: str | None = None, after: int = 0) -> ResidencyReport:
        """Return what has changed since report ``after`` of ``epoch``; everything, where that is
        another run's, or too long ago."""
        keys = self._store.resident_keys()
        with self._lock:
            now = {key: tuple(self._names.get(key, ())) for key in keys}
            changed = {key: names for key, names in now.items() if self._told.get(key) != names}
            gone = self._told.keys() - now.keys()
            if changed or gone:
                self._number += 1
                self._changes.append(_Change(changed, frozenset(gone)))
                self._told = now
            missed = self._number - after
            if epoch != self._epoch or not 0 <= missed <= len(self._changes):
                return ResidencyReport(self._epoch, self._number, True, self._told, ())
            resident: dict[str, tuple[str, ...]] = {}
            left: set[str] = set()
            for change in list(self._changes)[len(self._changes) - missed :]:
                resident = {k: v for k, v in resident.items() if k not in change.gone}
                resident |= change.resident
                left = (left | change.gone) - change.resident.keys()
            return ResidencyReport(self._epoch, self._number, False, resident, tuple(sorted(left)))
