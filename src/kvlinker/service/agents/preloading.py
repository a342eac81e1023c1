"""Reads chunks into memory before requests need them: frequently requested ones, on a server that
joins, and those that clients announce."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import as_completed, wait
from contextlib import suppress
from typing import NamedTuple

from kvlinker.base.errors import KVLinkerError
from kvlinker.engines.contract.contract import Engine
from kvlinker.store import Catalog, ChunkStore
from kvlinker.store.loading.prompt_load import Urgency

MEMORY_SHARE = 0.9
"""The share of memory that may be full when one more chunk is brought there."""

MOST_PENDING = 10_000
"""The most chunks of a tenant that may wait to be brought to memory."""

SCORE_BYTES = 16
"""The most bytes of a token's scores, in addition to its KV."""

AT_ONCE = 8
"""The chunks that are loaded, or computed, at a time."""

logger = logging.getLogger(__name__)


class _PendingChunk(NamedTuple):
    """A chunk that waits to be brought to memory, until a ``deadline``."""

    tenant: str
    """The tenant whose call or request asks for it."""

    deadline: float

    replaces: bool
    """True if chunks of its owner that are needed later may go for it."""


_Queues = OrderedDict[str, OrderedDict[str, _PendingChunk]]
"""Chunks by tenant and key, those first whose turn is first."""


def _enqueue(queues: _Queues, wanted: Mapping[str, _PendingChunk]) -> None:
    """Put chunks at the ends of their tenants' queues, as far as there is room; those that wait
    already do so until the later deadline."""
    for key, each in wanted.items():
        queue = queues.setdefault(each.tenant, OrderedDict())
        if len(queue) < MOST_PENDING or key in queue:
            queue[key] = max(queue.get(key, each), each, key=lambda wanted: wanted.deadline)


def _seconds_until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


class Preloading:
    """Loads chunks from slower tiers, or computes them again, in a thread of its own. Methods may
    be called from any thread."""

    def __init__(self, catalog: Catalog, store: ChunkStore, engine: Engine) -> None:
        self._catalog = catalog
        self._store = store
        self._engine = engine
        self._lock = threading.Lock()  # guards everything below
        self._waiting: _Queues = OrderedDict()
        self._refused: _Queues = OrderedDict()  # those for which requests had left no room
        self._pending = 0
        self._retries = 0
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def pending(self) -> int:
        """How many chunks are still to be brought to memory."""
        return self._pending

    def begin(
        self, keys: Sequence[str], seconds: float, *, tenant: str, replaces: bool = False
    ) -> int:
        """Bring chunks to memory in the order of ``keys``, after those of the tenant's calls
        before, for ``seconds`` at most and as long as memory has room. With ``replaces``, chunks of
        the same owner that are needed later are evicted for them. Returns how many chunks the
        tenant still waits for. Tenants take turns. Beyond ``MOST_PENDING``, chunks are left out."""
        wanted = _PendingChunk(tenant, time.monotonic() + seconds, replaces)
        with self._lock:
            self._add(dict.fromkeys(keys, wanted))
            return len(self._waiting.get(tenant, ()))

    def retry(self) -> None:
        """Bring those chunks to memory, as far as their time is not over, that were to replace
        others and found no room: a request has ended that held its own there."""
        with self._lock:
            self._retries += 1
            lacking, self._refused = self._refused, OrderedDict()
            now = time.monotonic()
            for queue in lacking.values():
                self._add({key: each for key, each in queue.items() if each.deadline > now})

    def _add(self, wanted: Mapping[str, _PendingChunk]) -> None:
        """Enqueue these chunks; the lock is held."""
        if self._closed.is_set():
            return
        lacking = {key: wanted[key] for key in wanted if not self._store.is_resident(key)}
        _enqueue(self._waiting, lacking)
        self._pending = sum(map(len, self._waiting.values()))
        if self._pending and self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Read no more, and wait for the reads under way. Idempotent."""
        self._closed.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        brought = 0
        try:
            while batch := self._next():
                retries = self._retries
                fitting = self._find_room(tuple(batch))
                there = self._load_batch({key: batch[key].deadline for key in fitting})
                refused = {key for key in there if not self._store.is_resident(key)}
                self._retry_refused(batch, refused | (batch.keys() - set(fitting)), retries)
                brought += sum(map(self._store.is_resident, batch))
        except Exception:  # a server that cannot do it begins without
            logger.exception("Chunks could not be brought to memory")
            with self._lock:
                self._end()
        logger.info("%d chunks were brought to memory.", brought)

    def _next(self) -> dict[str, _PendingChunk]:
        """Take the next chunks; there are none where nothing more is to be brought, and then the
        thread ends."""
        now = time.monotonic()
        batch: dict[str, _PendingChunk] = {}
        with self._lock:
            full = not self._has_room()
            while self._waiting and len(batch) < AT_ONCE:
                tenant, queue = self._waiting.popitem(last=False)
                while queue:  # what is not to be brought any more takes no turn
                    key, each = queue.popitem(last=False)
                    if each.deadline > now and (each.replaces or not full):
                        batch[key] = each
                        break
                if queue:
                    self._waiting[tenant] = queue  # behind all others
            self._pending = len(batch) + sum(map(len, self._waiting.values()))
            if self._closed.is_set() or not batch:
                self._end()
                return {}
            return batch

    def _end(self) -> None:
        """Drop waiting chunks; the next call begins anew."""
        self._waiting, self._pending, self._thread = OrderedDict(), 0, None

    def _load_batch(self, deadlines: Mapping[str, float]) -> list[str]:
        """Load some chunks, and compute those that no tier has, as far as their time is not over by
        then; returns those that there is KV of, whether memory took it or not."""
        loads = self._store.load(tuple(deadlines), Urgency(), ahead=True)
        keys = dict(zip(loads, deadlines, strict=True))
        latest = max(deadlines.values(), default=0.0)
        found, building = [], []
        with suppress(TimeoutError):
            for load in as_completed(loads, timeout=_seconds_until(latest)):
                key = keys[load]
                if load.exception():
                    continue
                if load.result() is not None:
                    found.append(key)
                    continue
                known = self._catalog.chunk(key)
                if known is None or known[0].contextual:  # the next to need it computes it
                    continue
                if known[2] == self._engine.fingerprint and _seconds_until(deadlines[key]):
                    with suppress(KVLinkerError):  # requests for it get the error
                        building.append(self._engine.cache_chunk(known[0], tenant=known[1]))
                        found.append(key)
        wait(building, timeout=_seconds_until(latest))
        return found

    def _retry_refused(
        self, batch: Mapping[str, _PendingChunk], lacking: Set[str], retries: int
    ) -> None:
        """Keep the chunks of a batch that found no room, although they may replace others, for
        another try. Enqueue them at once if a request has ended since there were ``retries``: it
        has freed memory."""
        with self._lock:
            again = {key: batch[key] for key in batch if key in lacking and batch[key].replaces}
            if retries != self._retries:
                self._add(again)
            else:
                _enqueue(self._refused, again)

    def _find_room(self, keys: Sequence[str]) -> list[str]:
        """Return those of the chunks that there is room for, or that others of their owners, which
        are needed later, have made room for now."""
        fitting, promised = [], 0
        for key in keys:
            found = self._catalog.chunk(key)
            if found is None:
                nbytes = self._store.nbytes(key) or 0
            else:
                nbytes = self._engine.kv_bytes(len(found[0])) + SCORE_BYTES * len(found[0])
            if self._store.make_room_for(key, promised + nbytes):
                promised += nbytes
                fitting.append(key)
        return fitting

    def _has_room(self) -> bool:
        """Return whether a chunk comes to memory without driving out another."""
        memory = self._store.usage()[0]
        return memory.used_bytes < MEMORY_SHARE * memory.budget_bytes
