"""Brings chunks to memory that others ask for often, before this server gets their requests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import suppress

from kvlinker.base.errors import KVLinkerError
from kvlinker.engines.contract.contract import Engine
from kvlinker.store import Catalog, ChunkStore
from kvlinker.store.loading.prompt_load import Urgency

MEMORY_SHARE = 0.9
"""The share of memory that may be full when one more chunk is brought there."""

AT_ONCE = 8
"""The chunks that are loaded, or computed, at a time."""

logger = logging.getLogger(__name__)


class Preloading:
    """Loads chunks from slower tiers, or computes them again, in a thread of its own. Methods may
    be called from any thread."""

    def __init__(self, catalog: Catalog, store: ChunkStore, engine: Engine) -> None:
        self._catalog = catalog
        self._store = store
        self._engine = engine
        self._lock = threading.Lock()  # guards everything below
        self._pending = 0
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def pending(self) -> int:
        """How many chunks are still to be brought to memory."""
        return self._pending

    def begin(self, keys: Sequence[str], seconds: float) -> int:
        """Bring chunks to memory, the first ones first, for so many seconds and as long as memory
        has room; returns how many are to be brought there. While that goes on, others are not
        begun."""
        with self._lock:
            if self._pending or self._closed.is_set():
                return self._pending
            missing = [key for key in dict.fromkeys(keys) if not self._store.is_resident(key)]
            self._pending = len(missing)
            if missing:
                self._thread = threading.Thread(
                    target=self._bring, args=(missing, time.monotonic() + seconds), daemon=True
                )
                self._thread.start()
            return self._pending

    def close(self) -> None:
        """Bring no more, and wait for what is under way. Idempotent."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _bring(self, keys: Sequence[str], deadline: float) -> None:
        try:
            for start in range(0, len(keys), AT_ONCE):
                if self._closed.is_set() or time.monotonic() >= deadline or not self._has_room():
                    break
                self._bring_batch(keys[start : start + AT_ONCE], deadline)
                self._pending = max(0, len(keys) - start - AT_ONCE)
        except Exception:  # a server that cannot do it begins without
            logger.exception("Chunks could not be brought to memory")
        finally:
            self._pending = 0
        there = sum(map(self._store.is_resident, keys))
        logger.info("%d of %d chunks that are asked for often are in memory.", there, len(keys))

    def _bring_batch(self, keys: Sequence[str], deadline: float) -> None:
        """Load some chunks, and compute those that no tier has."""
        loads = self._store.load(keys, Urgency(), ahead=True)
        loaded = wait(loads, timeout=max(0.0, deadline - time.monotonic())).done
        building = []
        for key, load in zip(keys, loads, strict=True):
            if load in loaded and not load.exception() and load.result() is None:
                found = self._catalog.chunk(key)
                if found is not None and found[2] == self._engine.fingerprint:
                    with suppress(KVLinkerError):  # whoever asks for it is told
                        building.append(self._engine.cache_chunk(found[0], tenant=found[1]))
        wait(building, timeout=max(0.0, deadline - time.monotonic()))

    def _has_room(self) -> bool:
        """Return whether a chunk comes to memory without driving out another."""
        memory = self._store.usage()[0]
        return memory.used_bytes < MEMORY_SHARE * memory.budget_bytes
