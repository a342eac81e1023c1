"""KV that no context cache holds any more goes from every tier, and stays gone; context caches are the caller."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable

from kvlinker.store.catalog.catalog import Catalog
from kvlinker.store.chunk_store import ChunkStore

LONGEST_REQUEST_SECONDS = 600.0
"""For as long after a chunk's deletion, a request that was under way may compute its KV again and store it."""

LONGEST_TRANSACTION_SECONDS = 15.0
"""What another process deletes is seen in the catalog at most so long after the time that it notes."""

MADE_UP_AT_ONCE = 1000
"""Deletions that some tier could not do, in one call."""


class Deletions:
    """Deletes from the store what the catalog released, whichever process released it. Methods may be called from any
    thread."""

    def __init__(self, catalog: Catalog, store: ChunkStore) -> None:
        self._catalog = catalog
        self._store = store
        self._lock = threading.Lock()
        self._followed_until = -math.inf
        self._recent: dict[str, float] = {}  # when they were released, for LONGEST_REQUEST_SECONDS

    def drop(self, keys: Iterable[str]) -> frozenset[str]:
        """Delete these chunks; returns those whose bytes are gone from all tiers."""
        return frozenset(key for key in keys if self._store.delete(key))

    def follow(self, now: float) -> None:
        """Delete what was released since the last call (by other processes, or before a crash), what requests under
        way stored again, and what a tier could not let go of earlier. ``now``: Unix seconds."""
        with self._lock:
            after = min(self._followed_until, now) - LONGEST_TRANSACTION_SECONDS
            released = self._catalog.released(after, now)
            self.drop(key for key, at in released.items() if self._recent.get(key) != at)
            settled = now - LONGEST_REQUEST_SECONDS
            recent = {key: at for key, at in self._recent.items() if at > settled}
            self.drop(self._catalog.unheld(self._store.lying(recent.keys())))
            self._recent = recent | released
            unfinished = self._catalog.released(-math.inf, settled, limit=MADE_UP_AT_ONCE)
            self._catalog.forget_released(self.drop(unfinished), settled)
            self._followed_until = now
