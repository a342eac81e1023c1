"""Deletes from all tiers the KV of chunks, at all places, that no context cache holds any more."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection, Iterable

from kvlinker.base.types.chunks import place_keys, with_places
from kvlinker.store.catalog.catalog import Catalog
from kvlinker.store.chunk_store import ChunkStore

LONGEST_REQUEST_SECONDS = 600.0
"""The seconds after a chunk's deletion during which a request that was under way may compute and
store its KV again; chosen by hand."""

LONGEST_TRANSACTION_SECONDS = 15.0
"""The most seconds between the time that another process notes for a deletion and the moment the
catalog shows it; chosen by hand."""

MADE_UP_AT_ONCE = 1000
"""The most failed deletions that one call tries again; chosen by hand."""


class Deletions:
    """Deletes from the store what the catalog released, whichever process released it. Methods may
    be called from any thread.

    A chunk that this process is creating is protected until the catalog holds it: its KV may be in
    the store from before a deletion, or be there again already.
    """

    def __init__(self, catalog: Catalog, store: ChunkStore) -> None:
        self._catalog = catalog
        self._store = store
        self._changed = threading.Condition()  # guards the two that follow
        self._protected: Counter[str] = Counter()
        self._deleting: Counter[str] = Counter()
        self._following = threading.Lock()
        self._followed_until = -math.inf
        self._recent: dict[str, float] = {}  # when they were released, for LONGEST_REQUEST_SECONDS

    def protect(self, keys: Collection[str]) -> None:
        """Delete none of these chunks until ``unprotect`` gets the same keys; waits for those
        that are just being deleted."""
        with self._changed:
            self._protected.update(keys)
            self._changed.wait_for(lambda: self._deleting.keys().isdisjoint(keys))

    def unprotect(self, keys: Collection[str]) -> None:
        """End what one call of ``protect`` began."""
        with self._changed:
            self._protected -= Counter(keys)

    def drop(self, keys: Iterable[str]) -> frozenset[str]:
        """Delete these chunks; returns those whose bytes are gone from all tiers. Chunks that are
        protected, or held by now, stay."""
        return frozenset(key for key in keys if self._delete(key))

    def follow(self, now: float) -> None:
        """Delete the chunks that were released since the last call, by other processes or before a
        crash, those that requests under way stored again, and those that a tier failed to delete.
        ``now``: Unix seconds."""
        with self._following:
            after = min(self._followed_until, now) - LONGEST_TRANSACTION_SECONDS
            released = self._catalog.released(after, math.inf)  # also before the clock was set back
            self.drop(key for key, at in released.items() if self._recent.get(key) != at)
            settled = now - LONGEST_REQUEST_SECONDS
            recent = {key: at for key, at in self._recent.items() if at > settled}
            stored = self._store.stored_here(with_places(recent))
            self.drop(key for key in recent if not stored.isdisjoint((key, *place_keys(key))))
            self._recent = recent | released
            unfinished = self._catalog.released(-math.inf, settled, limit=MADE_UP_AT_ONCE)
            self._catalog.forget_released(self.drop(unfinished), settled)
            self._followed_until = now

    def _delete(self, key: str) -> bool:
        with self._changed:
            if key in self._protected or not self._catalog.unheld([key]):
                return False
            self._deleting[key] += 1
        try:
            gone = [self._store.delete(each) for each in (key, *place_keys(key))]
            return all(gone)
        finally:
            with self._changed:
                self._deleting -= Counter([key])
                self._changed.notify_all()
