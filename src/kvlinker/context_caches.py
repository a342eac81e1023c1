"""Context caches as users hold them: the catalog says what exists, the store holds KV, the engine computes it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

from kvlinker.chunks import Chunk, GenerationContext, chunk_key
from kvlinker.engine.base import Engine
from kvlinker.errors import ContextCacheNotFoundError, ContextLengthError, InvalidRequestError
from kvlinker.futures import gather
from kvlinker.prompt.builder import PromptBuilder
from kvlinker.store import UNCHANGED, Catalog, ChunkStore, ContextCache, Page, Unchanged, new_context_cache_id

MAX_CHUNKS = 10_000


class ContextCaches:
    """Creates, finds, changes and deletes context caches. All methods may be called from any thread."""

    def __init__(
        self, *, model: str, builder: PromptBuilder, engine: Engine, catalog: Catalog, store: ChunkStore
    ) -> None:
        self._model = model
        self._builder = builder
        self._engine = engine
        self._catalog = catalog
        self._store = store
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvlinker-catalog")

    def create(
        self,
        texts: Sequence[str],
        *,
        tenant: str,
        expires_at: float | None = None,
        name: str | None = None,
        metadata: Mapping[str, str] | None = None,
        context: GenerationContext | None = None,
    ) -> Future[tuple[ContextCache, ...]]:
        """One context cache per text, in order, once the KV of all of them is in the store.

        ``expires_at`` is in Unix seconds. Raises InvalidRequestError and ContextLengthError for bad texts.
        """
        if not 0 < len(texts) <= MAX_CHUNKS:
            raise InvalidRequestError(
                f"'chunks' must hold 1 to {MAX_CHUNKS} texts, but holds {len(texts)}.", param="chunks"
            )
        chunks = [self._builder.encode_chunk(text, context) for text in texts]
        for index, chunk in enumerate(chunks):
            self._check_length(index, chunk)
        created = time.time()
        records = tuple(
            ContextCache(
                id=new_context_cache_id(),
                tenant=tenant,
                model=self._model,
                name=name,
                chunk=chunk,
                chunk_key=self.key(chunk, tenant),
                fingerprint=self._engine.fingerprint,
                created_at=created,
                expires_at=expires_at,
                metadata=metadata or {},
            )
            for chunk in chunks
        )
        entered: Future[tuple[ContextCache, ...]] = Future()
        computed = gather([self._engine.cache_chunk(chunk, tenant=tenant) for chunk in chunks], len)
        computed.add_done_callback(lambda done: self._computed(done, records, entered))
        return entered

    def get(self, cache_id: str, *, tenant: str) -> ContextCache:
        """Raises ContextCacheNotFoundError for unknown, expired and other tenants' ids alike."""
        found = self._catalog.get(cache_id, tenant, time.time())
        if found is None:
            raise ContextCacheNotFoundError(cache_id)
        return found

    def chunk(self, cache_id: str, *, tenant: str) -> Chunk:
        """The tokens that a context cache stands for in a prompt.

        Raises ContextCacheNotFoundError, and InvalidRequestError for one that was made with another model: its
        tokens would mean something else here.
        """
        found = self.get(cache_id, tenant=tenant)
        if found.fingerprint != self._engine.fingerprint:
            raise InvalidRequestError(
                f"Context cache {cache_id!r} was made with another model ({found.model}, or other weights or dtype) "
                f"than the one served now ({self._model}). Create it again.",
                param="id",
                code="context_cache_model_mismatch",
            )
        return found.chunk

    def list(
        self, *, tenant: str, limit: int = 20, after: str | None = None, order: Literal["asc", "desc"] = "desc"
    ) -> Page:
        """A page in order of creation. ``after`` is the last id of the page before.

        Raises ContextCacheNotFoundError where that does not exist.
        """
        return self._catalog.list(tenant, time.time(), limit=limit, after=after, order=order)

    def update(
        self,
        cache_id: str,
        *,
        tenant: str,
        expires_at: float | Unchanged | None = UNCHANGED,
        name: str | Unchanged | None = UNCHANGED,
        metadata: Mapping[str, str] | Unchanged = UNCHANGED,
    ) -> ContextCache:
        """Change what is given; None clears ``expires_at`` or ``name``. Raises ContextCacheNotFoundError."""
        return self._catalog.update(cache_id, tenant, time.time(), expires_at=expires_at, name=name, metadata=metadata)

    def delete(self, cache_id: str, *, tenant: str) -> None:
        """Delete one; its KV goes when no other context cache holds it. Raises ContextCacheNotFoundError."""
        self._drop(self._catalog.delete(cache_id, tenant, time.time()))

    def sweep(self) -> int:
        """Delete what has expired; returns the number of chunks whose KV went."""
        released = self._catalog.expire(time.time())
        self._drop(released)
        return len(released)

    def tier(self, cache: ContextCache) -> str | None:
        """Fastest tier that holds its KV; None while it was evicted (it is computed again when used)."""
        return self._store.tier_of(cache.chunk_key)

    def nbytes(self, cache: ContextCache) -> int:
        """Bytes of its KV in the store; 0 while it was evicted."""
        return self._store.nbytes(cache.chunk_key) or 0

    def key(self, chunk: Chunk, tenant: str) -> str:
        return chunk_key(chunk, fingerprint=self._engine.fingerprint, tenant=tenant)

    def close(self) -> None:
        """Finish what is being entered."""
        self._writer.shutdown()

    def _computed(
        self, done: Future[int], records: tuple[ContextCache, ...], entered: Future[tuple[ContextCache, ...]]
    ) -> None:
        """Runs in the engine's thread, which must not wait for the catalog's disk."""
        try:
            done.result()
            self._writer.submit(self._enter, records, entered)
        except BaseException as error:
            entered.set_exception(error)

    def _enter(self, records: tuple[ContextCache, ...], entered: Future[tuple[ContextCache, ...]]) -> None:
        try:
            self._catalog.add(records)
            entered.set_result(records)
        except BaseException as error:
            entered.set_exception(error)

    def _drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.delete(key)

    def _check_length(self, index: int, chunk: Chunk) -> None:
        length = len(chunk.prefix) + len(chunk)
        if length > self._engine.max_model_len:
            raise ContextLengthError(
                f"Chunk {index} has {len(chunk)} tokens ({length} with what stands before it); the model takes "
                f"{self._engine.max_model_len}. Split it: send it as 'input' with 'split'.",
                param="chunks",
            )
