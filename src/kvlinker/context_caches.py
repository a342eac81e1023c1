"""Context caches as users hold them: the catalog says what exists, the store holds KV, the engine computes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from kvlinker.chunk_texts import ChunkTexts
from kvlinker.engine.contract import Engine
from kvlinker.errors import (
    ContextCacheModelError,
    ContextCacheNotFoundError,
    ContextLengthError,
    InvalidRequestError,
    PermissionDeniedError,
    PinLimitError,
    QuotaExceededError,
)
from kvlinker.futures import gather
from kvlinker.prompt.builder import PromptBuilder
from kvlinker.store import (
    UNCHANGED,
    Catalog,
    ChunkStore,
    ContextCache,
    Limits,
    Page,
    StoreError,
    TenantUsage,
    TierUsage,
    Unchanged,
    new_context_cache_id,
)
from kvlinker.store.catalog.releases import Deletions
from kvlinker.types.chunks import Chunk, GenerationContext, chunk_key
from kvlinker.types.tenants import NO_QUOTAS, SHARED_TENANT, UNLIMITED, Quota, Quotas, Scope
from kvlinker.types.texts import CacheContent, SearchHit

MAX_CHUNKS = 10_000
"""The most chunks that one call creates context caches of."""

Metadata = Mapping[str, str] | Sequence[Mapping[str, str]]
"""The metadata of several context caches: one for all of them, or one for each in order."""

DELETED_AT_ONCE = 1000
"""The number of context caches that a deletion by metadata removes in one transaction."""


@dataclass(frozen=True, slots=True)
class CachesUsage:
    """Tells what a tenant has, and may have.

    ``kept``: its context caches and chunks by the catalog; ``pinned_bytes``: its pinned KV as computed; ``tiers``: what
    its KV takes up in each tier.
    """

    kept: TenantUsage
    pinned_bytes: int
    quota: Quota
    tiers: tuple[TierUsage, ...]


class ContextCaches:
    """Creates, finds, changes and deletes context caches. All methods may be called from any thread.

    What they answer outlasts a power cut.
    """

    def __init__(
        self,
        *,
        model: str,
        builder: PromptBuilder,
        engine: Engine,
        catalog: Catalog,
        store: ChunkStore,
        texts: ChunkTexts,
        quotas: Quotas = NO_QUOTAS,
    ) -> None:
        """Also finishes the deletions that the last process on this catalog was in the midst of."""
        self._model = model
        self._builder = builder
        self._engine = engine
        self._catalog = catalog
        self._store = store
        self._texts = texts
        self._limits = Limits(quotas, pinned_bytes=store.largest_budget_bytes // 2)
        self._pinning = threading.Lock()  # what the catalog says reaches the store before the catalog is asked again
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvlinker-catalog")
        self._deletions = Deletions(catalog, store)
        catalog.set_sizes(engine.fingerprint, engine.kv_bytes_per_token)
        self.sweep()

    def create(
        self,
        texts: Sequence[str],
        *,
        tenant: str,
        expires_at: float | None = None,
        name: str | None = None,
        metadata: Metadata | None = None,
        context: GenerationContext | None = None,
        pinned: bool = False,
        scope: Scope = Scope.PRIVATE,
        admin: bool = False,
    ) -> Future[tuple[ContextCache, ...]]:
        """One context cache per text, in order, once the KV of all of them is in the store.

        ``expires_at`` is in Unix seconds. ``metadata``: that of all, or one for each. ``admin``: the caller may write
        shared ones. Raises InvalidRequestError and
        ContextLengthError for bad texts, PermissionDeniedError, QuotaExceededError and PinLimitError; the last two are
        the future's where others took the room meanwhile.
        """
        _check_rights(scope, admin)
        owner = _owner(scope, tenant)
        if not 0 < len(texts) <= MAX_CHUNKS:
            raise InvalidRequestError(
                f"'chunks' must hold 1 to {MAX_CHUNKS} texts, but holds {len(texts)}.", param="chunks"
            )
        labels = _each(metadata, len(texts))
        shared = scope is Scope.SHARED
        chunks = [replace(self._encoded(index, text, context), shared=shared) for index, text in enumerate(texts)]
        created = time.time()
        records = tuple(
            ContextCache(
                id=new_context_cache_id(),
                tenant=owner,
                model=self._model,
                name=name,
                chunk=chunk,
                chunk_key=self.key(chunk, owner),
                fingerprint=self._engine.fingerprint,
                created_at=created,
                expires_at=expires_at,
                metadata=label,
                pinned=pinned,
                kv_bytes=len(chunk) * self._engine.kv_bytes_per_token,
            )
            for chunk, label in zip(chunks, labels, strict=True)
        )
        if pinned or self._limits.quotas.of(owner) != UNLIMITED:
            self._with_room(lambda: self._catalog.check_room(records, self._limits))
        entered: Future[tuple[ContextCache, ...]] = Future()
        computed = gather([self._engine.cache_chunk(chunk, tenant=owner) for chunk in chunks], len)
        computed.add_done_callback(lambda done: self._computed(done, records, entered))
        return entered

    def get(self, cache_id: str, *, tenant: str) -> ContextCache:
        """The tenant's own or a shared one. Raises ContextCacheNotFoundError for unknown, expired and other tenants'
        ids alike."""
        found = self._catalog.get(cache_id, tenant, time.time())
        if found is None:
            raise ContextCacheNotFoundError(cache_id)
        return found

    def content(self, cache_id: str, *, tenant: str) -> CacheContent:
        """Read the text and the token ids of one. Raises what ``chunks`` does."""
        found = self.get(cache_id, tenant=tenant)
        tokens = self._usable_chunk(cache_id, found).tokens
        return CacheContent(cache_id, self._texts.text(tokens), tokens, found.metadata)

    def search(
        self,
        query: str,
        *,
        tenant: str,
        limit: int = 10,
        metadata: Mapping[str, str] | None = None,
        scope: Scope = Scope.PRIVATE,
    ) -> tuple[SearchHit, ...]:
        """Find context caches by words of their texts, the best match first: the tenant's own, or the shared ones, that
        have all pairs of ``metadata`` and were made with the model served now.

        Of those that hold the same chunk, only the newest. Raises InvalidRequestError for a query without words, and
        where search is off.
        """
        return self._texts.search(query, tenant=scope.owner(tenant), limit=limit, metadata=metadata or {})

    def is_usable(self, cache: ContextCache) -> bool:
        """Return False for a context cache that was made with another model than the one served now."""
        return cache.fingerprint == self._engine.fingerprint

    def chunks(self, cache_ids: Iterable[str], *, tenant: str) -> dict[str, Chunk]:
        """The chunks that context caches stand for in a prompt, by id, in the order given; asks the catalog once.

        Raises for the first id that has none: ContextCacheNotFoundError as ``get`` does, and ContextCacheModelError for
        a context cache that was made with another model.
        """
        wanted = tuple(dict.fromkeys(cache_ids))
        found = self._catalog.get_many(wanted, tenant, time.time())
        return {cache_id: self._usable_chunk(cache_id, found.get(cache_id)) for cache_id in wanted}

    def list(
        self,
        *,
        tenant: str,
        limit: int = 20,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
        metadata: Mapping[str, str] | None = None,
        scope: Scope = Scope.PRIVATE,
    ) -> Page:
        """A page in order of creation: the tenant's own, or the shared ones, that have all pairs of ``metadata``.

        ``after`` is the last id of the page before. Raises ContextCacheNotFoundError where that does not exist.
        """
        return self._catalog.list(
            scope.owner(tenant), time.time(), limit=limit, after=after, order=order, metadata=metadata or {}
        )

    def update(
        self,
        cache_id: str,
        *,
        tenant: str,
        expires_at: float | Unchanged | None = UNCHANGED,
        name: str | Unchanged | None = UNCHANGED,
        metadata: Mapping[str, str] | Unchanged = UNCHANGED,
        pinned: bool | Unchanged = UNCHANGED,
        admin: bool = False,
    ) -> ContextCache:
        """Change what is given; None clears ``expires_at`` or ``name``.

        Raises ContextCacheNotFoundError, PinLimitError, and PermissionDeniedError for a shared one unless ``admin``.
        """
        owner = self._writable(cache_id, tenant, admin)
        updated = self._catalog.update(
            cache_id,
            owner,
            time.time(),
            expires_at=expires_at,
            name=name,
            metadata=metadata,
            pinned=pinned,
            limits=self._limits,
        )
        self._catalog.persist()
        if pinned is not UNCHANGED:
            self._pin()
        return updated

    def delete(self, cache_id: str, *, tenant: str, admin: bool = False) -> None:
        """Delete one; its KV goes when no other context cache holds it.

        Raises ContextCacheNotFoundError, and PermissionDeniedError for a shared one unless ``admin``.
        """
        owner = self._writable(cache_id, tenant, admin)
        released = self._catalog.delete(cache_id, owner, time.time())
        self._catalog.persist()
        self._deletions.drop(released)

    def delete_matching(
        self, metadata: Mapping[str, str], *, tenant: str, scope: Scope = Scope.PRIVATE, admin: bool = False
    ) -> int:
        """Delete all that have all pairs of ``metadata``; returns how many.

        Raises InvalidRequestError for no pairs, and PermissionDeniedError for shared ones unless ``admin``.
        """
        _check_rights(scope, admin)
        if not metadata:
            raise InvalidRequestError(
                "Which context caches to delete? Give at least one pair, such as metadata[project]=x.", param="metadata"
            )
        deleted = 0
        while True:
            count, released = self._catalog.delete_matching(
                scope.owner(tenant), time.time(), metadata, limit=DELETED_AT_ONCE
            )
            self._catalog.persist()
            self._deletions.drop(released)
            deleted += count
            if count < DELETED_AT_ONCE:
                return deleted

    def sweep(self) -> int:
        """Delete what has expired; returns the number of context caches.

        Also takes over what other processes on this catalog deleted and pinned, has chunks searched that were not, and
        deletes again what a request that
        ran during a deletion computed and stored after it, and what a tier could not delete before.
        """
        now = time.time()
        expired, released = self._catalog.expire(now)
        self._deletions.drop(released)
        self._deletions.follow(now)
        self._pin()
        self._texts.catch_up()
        return expired

    def usage(self, *, tenant: str, scope: Scope = Scope.PRIVATE) -> CachesUsage:
        """Tell what the tenant, or the shared corpus, has, and how much it may have."""
        owner = scope.owner(tenant)
        return CachesUsage(
            self._catalog.usage(owner),
            self._catalog.pinned_bytes(owner),
            self._limits.quotas.of(owner),
            self._store.usage_of(self._catalog.keys_of(owner)),
        )

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
            self._with_room(lambda: self._catalog.add(records, self._limits))
            self._catalog.persist()
            if records[0].pinned:
                self._pin()
            with suppress(StoreError):  # the next sweep catches up
                self._texts.index({record.chunk_key: record.chunk for record in records})
            entered.set_result(records)
        except BaseException as error:
            with suppress(StoreError):
                self._deletions.drop(self._catalog.unheld(record.chunk_key for record in records))
            entered.set_exception(error)

    def _with_room(self, enter: Callable[[], None]) -> None:
        """Enter; where a limit is in the way, expired context caches that remain make room."""
        try:
            enter()
        except (QuotaExceededError, PinLimitError):
            if not self.sweep():
                raise
            enter()

    def _writable(self, cache_id: str, tenant: str, admin: bool) -> str:
        """The owner of a context cache that the tenant may change."""
        found = self.get(cache_id, tenant=tenant)
        _check_rights(found.scope, admin)
        return found.tenant

    def _usable_chunk(self, cache_id: str, found: ContextCache | None) -> Chunk:
        if found is None:
            raise ContextCacheNotFoundError(cache_id)
        if not self.is_usable(found):
            raise ContextCacheModelError(cache_id, made_with=found.model, served=self._model)
        return found.chunk

    def _pin(self) -> None:
        with self._pinning:
            self._store.set_pinned(self._catalog.pinned())

    def _encoded(self, index: int, text: str, context: GenerationContext | None) -> Chunk:
        """Return the chunk of the text at ``index``, which errors name."""
        try:
            chunk = self._builder.encode_chunk(text, context)
            length = len(chunk.prefix) + len(chunk)
            if length > self._engine.max_model_len:
                raise ContextLengthError(
                    f"Chunk {index} has {len(chunk)} tokens ({length} with what stands before it); the model takes "
                    f"{self._engine.max_model_len}. Split it: send it as 'input' with 'split'.",
                    param="chunks",
                )
            return chunk
        except InvalidRequestError as error:
            if error.param == "chunks":
                error.param = f"chunks.{index}"
            raise


def _each(metadata: Metadata | None, count: int) -> Sequence[Mapping[str, str]]:
    """The metadata of each of ``count`` context caches. Raises InvalidRequestError for a list of another length."""
    if metadata is None or isinstance(metadata, Mapping):
        return [metadata or {}] * count
    if len(metadata) != count:
        raise InvalidRequestError(
            f"'metadata' is a list of {len(metadata)}, but there are {count} chunks. One for all, or one each.",
            param="metadata",
        )
    return metadata


def _owner(scope: Scope, tenant: str) -> str:
    """Raises InvalidRequestError for the name that stands for shared context caches."""
    if tenant == SHARED_TENANT:
        raise InvalidRequestError(
            f"A tenant cannot be called {tenant!r}. For context caches that all may use, give scope 'shared'.",
            param="tenant",
        )
    return scope.owner(tenant)


def _check_rights(scope: Scope, admin: bool) -> None:
    """Raises PermissionDeniedError."""
    if scope is Scope.SHARED and not admin:
        raise PermissionDeniedError(
            "Shared context caches are written by admins only. Use a key that the server has among its admin_keys, or "
            "leave 'scope' out.",
            param="scope",
        )
