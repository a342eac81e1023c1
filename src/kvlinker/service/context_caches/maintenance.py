"""Keeps the store and the search index in step with the catalog, whichever process changed it."""

from __future__ import annotations

import math
import threading
import time

from kvlinker.base.types.chunks import with_places
from kvlinker.service.context_caches.texts import ChunkTexts
from kvlinker.store import Catalog, ChunkStore
from kvlinker.store.deletions import Deletions

EXPIRED_AT_ONCE = 200
"""The most context caches, or responses, that are removed in one transaction: others wait for its
end."""


class Maintenance:
    """Deletes, pins and indexes chunks as the catalog has them. All methods may be called from any
    thread."""

    def __init__(self, catalog: Catalog, store: ChunkStore, texts: ChunkTexts) -> None:
        self._catalog = catalog
        self._store = store
        self._texts = texts
        self.deletions = Deletions(catalog, store)
        """Deletes the KV of chunks that the catalog releases."""

        self._swept_at = math.inf  # by the clock; as if it had been set back since
        self._pinning = (
            threading.Lock()
        )  # what the catalog says reaches the store before the catalog is asked again

    def sweep(self) -> int:
        """Delete expired context caches and responses; returns the number of context caches.

        Also takes over what other processes on this catalog deleted and pinned, indexes texts that
        are not in the search index yet, and deletes again chunks that a request stored after their
        deletion, and chunks that a tier could not delete before. Where the clock was set back,
        implicit context caches that were used later than now count as used now.
        """
        now = time.time()
        if now < self._swept_at:
            self._catalog.implicit.count_uses_until(now)
        self._swept_at = now
        expired, count = 0, EXPIRED_AT_ONCE
        while count == EXPIRED_AT_ONCE:
            count, released = self._catalog.expire(now, limit=EXPIRED_AT_ONCE)
            self.deletions.drop(released)
            expired += count
        while self._catalog.responses.expire(now, limit=EXPIRED_AT_ONCE) == EXPIRED_AT_ONCE:
            pass
        self.deletions.follow(now)
        self.pin()
        self._texts.catch_up()
        return expired

    def pin(self) -> None:
        """Report to the store which chunks are pinned now."""
        with self._pinning:
            self._store.set_pinned(with_places(self._catalog.pinned()))
