"""Builds chunks for other servers, which share the catalog and a tier."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from kvlinker.base.errors import ContextCacheNotFoundError
from kvlinker.base.futures import chain
from kvlinker.engines.contract.contract import Engine
from kvlinker.store import Catalog, ChunkStore


class Building:
    """Computes chunks for other servers. Calls may come from any thread."""

    def __init__(self, engine: Engine, catalog: Catalog, store: ChunkStore) -> None:
        self._engine = engine
        self._catalog = catalog
        self._store = store
        self._thread = ThreadPoolExecutor(1, "kvlinker-building")

    def build(self, chunk_key: str) -> Future[int]:
        """Have a chunk computed, where no tier has it; the future has its bytes once the shared
        tiers have it. Raises ContextCacheNotFoundError for a chunk of no context cache of this
        model."""
        found = self._catalog.chunk(chunk_key)
        if found is None or found[2] != self._engine.fingerprint:
            raise ContextCacheNotFoundError(chunk_key)
        chunk, owner, _ = found

        def share(nbytes: int) -> Future[int]:
            return self._thread.submit(self._share, chunk_key, nbytes)

        return chain(self._engine.cache_chunk(chunk, tenant=owner), share)

    def close(self) -> None:
        """Finish the transfers under way."""
        self._thread.shutdown()

    def _share(self, chunk_key: str, nbytes: int) -> int:
        """Bring a chunk to those shared tiers that lack it; returns ``nbytes``."""
        self._store.flush()
        shared = (tier for tier in self._store.slower_tiers() if tier.shared)
        if not all(tier.contains(chunk_key) for tier in shared):
            kv = self._store.get_computed(chunk_key)
            if kv is not None:
                self._store.put(chunk_key, kv)
                self._store.flush()
        return nbytes
