"""Which chunks the memory of all workers has: the scheduler side keeps it, and sends changes to
front ends with the outcomes of their requests."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable
from itertools import takewhile

from pydantic import BaseModel, ConfigDict

KNOWN = "kvlinker_known"
"""The name, among a request's ``kv_transfer_params``, of its front end's state: the number of the
last change, by run. It is not signed: a wrong number only makes the answer longer or shorter."""

MOST_CHANGES = 10_000
"""The most chunks whose last change is remembered; a front end that knows less gets all of them."""


class MemoryReport(BaseModel):
    """The changes up to change ``number`` of a run of the scheduler side: keys of chunks that all
    workers have in memory now, and of others. ``whole``: they have no more than those."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    number: int
    whole: bool
    held: tuple[str, ...]
    gone: tuple[str, ...] = ()


class WorkerMemory:
    """The workers' reports. Belongs to one thread."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._run = secrets.token_hex(8)
        self._ranks: dict[str, set[int]] = {}  # those that have a chunk, by its key
        self._number = 0
        self._changes: OrderedDict[str, int] = OrderedDict()  # each chunk's last one, oldest first
        self._forgotten = 0  # the newest that is not among them

    def note(self, held: Iterable[tuple[str, int]], evicted: Iterable[tuple[str, int]]) -> None:
        """Take note of chunks that came to workers' memory, and of those that left it, each with
        the worker's rank."""
        for key, rank in evicted:
            if self.holds(key):
                self._change(key)
            self._ranks.get(key, set()).discard(rank)
            if not self._ranks.get(key):
                self._ranks.pop(key, None)
        for key, rank in held:
            before = self.holds(key)
            self._ranks.setdefault(key, set()).add(rank)
            if self.holds(key) != before:
                self._change(key)

    def holds(self, key: str) -> bool:
        """Return whether all workers have the chunk in memory."""
        return len(self._ranks.get(key, ())) >= self._workers

    def changes(self, known: object) -> MemoryReport:
        """Return the changes since the state of a request's front end, by ``KNOWN``."""
        number = known.get(self._run) if isinstance(known, dict) else None
        if not isinstance(number, int) or not self._forgotten <= number <= self._number:
            held = tuple(filter(self.holds, self._ranks))
            return MemoryReport(run=self._run, number=self._number, whole=True, held=held)
        newest = takewhile(lambda change: change[1] > number, reversed(self._changes.items()))
        keys = [key for key, _ in newest]
        return MemoryReport(
            run=self._run,
            number=self._number,
            whole=False,
            held=tuple(filter(self.holds, keys)),
            gone=tuple(key for key in keys if not self.holds(key)),
        )

    def _change(self, key: str) -> None:
        self._number += 1
        self._changes[key] = self._number
        self._changes.move_to_end(key)
        if len(self._changes) > MOST_CHANGES:
            _, self._forgotten = self._changes.popitem(last=False)


class KnownMemory:
    """The knowledge of a front end about each run, of which vLLM may have several schedulers.
    Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str, tuple[int, frozenset[str]]] = {}

    def change_numbers(self) -> dict[str, int]:
        """Return the value of ``KNOWN`` in requests."""
        with self._lock:
            return {run: number for run, (number, _) in self._runs.items()}

    def note(self, report: MemoryReport) -> None:
        """Take note of a report, unless a later one came before."""
        with self._lock:
            number, keys = self._runs.get(report.run, (-1, frozenset()))
            if report.number > number:
                keys = frozenset() if report.whole else keys - frozenset(report.gone)
                self._runs[report.run] = report.number, keys | frozenset(report.held)

    def keys(self) -> frozenset[str]:
        """Return the keys of all chunks that some run's workers have in memory."""
        with self._lock:
            return frozenset().union(*(keys for _, keys in self._runs.values()))
