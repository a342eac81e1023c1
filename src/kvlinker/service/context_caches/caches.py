"""Finds, changes and deletes context caches: the catalog says what exists, the store holds their
KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from kvlinker.base.errors import (
    ContextCacheModelError,
    ContextCacheNotFoundError,
    InvalidRequestError,
    PermissionDeniedError,
)
from kvlinker.base.events import ChunkNamed, Events
from kvlinker.base.types.chunks import GenerationContext, split_salt, with_places
from kvlinker.base.types.tenants import NO_QUOTAS, SHARED_TENANT, Quota, Quotas, Scope
from kvlinker.base.types.texts import CacheContent, SearchHit
from kvlinker.engines.contract.contract import Engine, engine_closed
from kvlinker.prompting.builder import PromptBuilder
from kvlinker.service.context_caches.checks import check_fields, check_tenant, check_ttl
from kvlinker.service.context_caches.creation import Creation, Metadata
from kvlinker.service.context_caches.maintenance import Maintenance
from kvlinker.service.context_caches.texts import ChunkTexts
from kvlinker.store import (
    UNCHANGED,
    Catalog,
    ChunkStore,
    ContextCache,
    Limits,
    Page,
    TenantUsage,
    TierUsage,
    Unchanged,
)

ADMINS_ONLY = (
    "Shared context caches are written by admins only. Use a key that the server has among its"
    " admin_keys"
)

DELETED_AT_ONCE = 1000
"""The number of context caches that a deletion by metadata removes in one transaction."""


@dataclass(frozen=True, slots=True)
class CachesUsage:
    """A tenant's usage, and its limits.

    ``kept``: its context caches and chunks by the catalog; ``pinned_bytes``: its pinned KV as
    computed; ``tiers``: the size of its KV in each tier.
    """

    kept: TenantUsage
    pinned_bytes: int
    quota: Quota
    tiers: tuple[TierUsage, ...]


class ContextCaches:
    """Creates, finds, changes and deletes context caches. All methods may be called from any
    thread.

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
        events: Events,
        quotas: Quotas = NO_QUOTAS,
        implicit_caches: int | None = None,
        builds: bool = False,
    ) -> None:
        """Finish the deletions that the last process on this catalog was in the midst of.

        ``implicit_caches``: the most implicit context caches that a tenant has at a time, of which
        those that were used longest ago make room for others; None for no limit. ``builds``: chunks
        are created for other servers, and are in the shared tiers before they are reported.
        """
        self._model = model
        self._events = events
        self._engine = engine
        self._catalog = catalog
        self._store = store
        self._texts = texts
        self._limits = Limits(quotas, store.largest_budget_bytes // 2, implicit_caches)
        self._maintenance = Maintenance(catalog, store, texts)
        self.creation = Creation(
            model=model,
            builder=builder,
            engine=engine,
            catalog=catalog,
            store=store,
            texts=texts,
            limits=self._limits,
            maintenance=self._maintenance,
            events=events,
            shares=store.flush if builds else None,
        )
        """Creates them also of what no caller creates: of marked texts, and of answers."""

        self.sweep()

    def create(
        self,
        texts: Sequence[str],
        *,
        tenant: str,
        expires_at: float | None = None,
        ttl: float | None = None,
        name: str | None = None,
        metadata: Metadata | None = None,
        context: GenerationContext | None = None,
        pinned: bool = False,
        scope: Scope = Scope.PRIVATE,
        admin: bool = False,
        advance: Callable[[], object] = lambda: None,
    ) -> Future[tuple[ContextCache, ...]]:
        """Create one context cache per text, in order; the future has them once the KV of all is in
        the store. ``advance`` is called as that of each comes, from any thread.

        ``expires_at`` is in Unix seconds; ``ttl``, in its place, is in seconds from when all can be
        used. ``metadata``: that of all, or one for each. ``admin``: the caller may write shared
        ones. Raises InvalidRequestError and ContextLengthError for bad
        texts and fields, PermissionDeniedError, EngineClosedError, QuotaExceededError and
        PinLimitError; the last two are the future's where others took the room meanwhile.
        """
        if not self._engine.healthy:
            raise engine_closed()
        check_tenant(tenant)
        check_fields(expires_at=expires_at, name=name, metadata=metadata, pinned=pinned)
        if ttl is not None:
            check_ttl(ttl)
        _check_rights(scope, admin)
        return self.creation.begin(
            texts,
            owner=_owner(scope, tenant),
            expires_at=expires_at,
            ttl=ttl,
            name=name,
            metadata=metadata,
            context=context,
            pinned=pinned,
            advance=advance,
        )

    def get(self, cache_id: str, *, tenant: str) -> ContextCache:
        """Return the tenant's own or a shared one.

        Raises ContextCacheNotFoundError for unknown, expired and other tenants' ids alike.
        """
        found = self._catalog.get(cache_id, tenant, time.time())
        if found is None:
            raise ContextCacheNotFoundError(cache_id)
        return found

    def content(self, cache_id: str, *, tenant: str) -> CacheContent:
        """Read the text and the token ids of one. Raises the errors of ``usable``."""
        found = self._usable(cache_id, self.get(cache_id, tenant=tenant))
        tokens = found.chunk.tokens
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
        """Find context caches by words, and with an embedding model also by meaning, the best match
        first: the tenant's own, or the shared ones, that have all pairs of ``metadata`` and were
        made with the model served now. Of those that hold the same chunk, only the newest. Raises
        InvalidRequestError for a query without words, and where search is off.
        """
        return self._texts.search(
            query, tenant=scope.owner(tenant), limit=limit, metadata=metadata or {}
        )

    def settle(self) -> None:
        """Wait until everything created so far can be found by meaning, if that is enabled."""
        self._texts.settle()

    def is_usable(self, cache: ContextCache) -> bool:
        """Return False for a context cache that was made with another model than the one served
        now."""
        return split_salt(cache.fingerprint)[0] == self._engine.fingerprint

    def usable(self, cache_ids: Iterable[str], *, tenant: str) -> dict[str, ContextCache]:
        """Return the context caches whose chunks may stand in a prompt, by id, in the order given.

        The catalog is asked once. Raises for the first id that has none: ContextCacheNotFoundError
        as ``get`` does, and ContextCacheModelError for a context cache that was made with another
        model.
        """
        wanted = tuple(dict.fromkeys(cache_ids))
        found = self._catalog.get_many(wanted, tenant, time.time())
        usable = {cache_id: self._usable(cache_id, found.get(cache_id)) for cache_id in wanted}
        for cache_id, cache in usable.items():
            self._events.publish(ChunkNamed(cache.chunk_key, (cache_id,), cache.tenant))
        return usable

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
        """List a page in order of creation: the tenant's own, or the shared ones, that have all
        pairs of ``metadata``.

        ``after`` is the last id of the page before. Raises ContextCacheNotFoundError if that does
        not exist.
        """
        return self._catalog.list(
            scope.owner(tenant),
            time.time(),
            limit=limit,
            after=after,
            order=order,
            metadata=metadata or {},
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
        """Change the given fields; None clears ``expires_at`` or ``name``.

        Raises InvalidRequestError, ContextCacheNotFoundError, PinLimitError, and
        PermissionDeniedError for a shared one unless ``admin``.
        """
        check_fields(expires_at=expires_at, name=name, metadata=metadata, pinned=pinned)
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
            self._maintenance.pin()
        return updated

    def delete(self, cache_id: str, *, tenant: str, admin: bool = False) -> None:
        """Delete one; its KV goes when no other context cache holds it.

        Raises ContextCacheNotFoundError, and PermissionDeniedError for a shared one unless
        ``admin``.
        """
        owner = self._writable(cache_id, tenant, admin)
        released = self._catalog.delete(cache_id, owner, time.time())
        self._catalog.persist()
        self._maintenance.deletions.drop(released)

    def delete_matching(
        self,
        metadata: Mapping[str, str],
        *,
        tenant: str,
        scope: Scope = Scope.PRIVATE,
        admin: bool = False,
    ) -> int:
        """Delete all that have all pairs of ``metadata``; returns how many.

        Raises InvalidRequestError for no pairs, and PermissionDeniedError for shared ones unless
        ``admin``.
        """
        _check_rights(scope, admin)
        if not metadata:
            raise InvalidRequestError(
                "Which context caches to delete? Give at least one pair, such as"
                " metadata[project]=x.",
                param="metadata",
            )
        deleted = 0
        while True:
            count, released = self._catalog.delete_matching(
                scope.owner(tenant), time.time(), metadata, limit=DELETED_AT_ONCE
            )
            self._catalog.persist()
            self._maintenance.deletions.drop(released)
            deleted += count
            if count < DELETED_AT_ONCE:
                return deleted

    def sweep(self) -> int:
        """Delete expired context caches; returns the number of context caches.

        Also takes over the changes of other processes on this catalog; see ``Maintenance.sweep``.
        """
        return self._maintenance.sweep()

    def usage(self, *, tenant: str, scope: Scope = Scope.PRIVATE) -> CachesUsage:
        """Return the usage of the tenant, or of the shared corpus, and its limits."""
        owner = scope.owner(tenant)
        return CachesUsage(
            self._catalog.usage(owner),
            self._catalog.pinned_bytes(owner),
            self._limits.quotas.of(owner),
            self._store.usage_of(with_places(self._catalog.keys_of(owner))),
        )

    def tier(self, cache: ContextCache) -> str | None:
        """Name the fastest tier that holds its KV; None while it was evicted (it is computed again
        when used)."""
        return self._store.tier_of(cache.chunk_key)

    def nbytes(self, cache: ContextCache) -> int:
        """Return the bytes of its KV in the store; 0 while it was evicted."""
        return self._store.nbytes(cache.chunk_key) or 0

    def close(self) -> None:
        """Finish the creations under way."""
        self.creation.close()
        self._texts.close()

    def _writable(self, cache_id: str, tenant: str, admin: bool) -> str:
        """Return the owner of a context cache that the tenant may change."""
        found = self.get(cache_id, tenant=tenant)
        if found.scope is Scope.SHARED and not admin:
            raise PermissionDeniedError(f"{ADMINS_ONLY}.", param="id")
        return found.tenant

    def _usable(self, cache_id: str, found: ContextCache | None) -> ContextCache:
        if found is None:
            raise ContextCacheNotFoundError(cache_id)
        if not self.is_usable(found):
            raise ContextCacheModelError(cache_id, made_with=found.model, served=self._model)
        return found


def _owner(scope: Scope, tenant: str) -> str:
    """Return the owner of the tenant's new context caches. Raises InvalidRequestError for the name
    that stands for shared context caches."""
    if tenant == SHARED_TENANT:
        raise InvalidRequestError(
            f"A tenant cannot be called {tenant!r}. For context caches that all may use, give scope"
            " 'shared'.",
            param="tenant",
        )
    return scope.owner(tenant)


def _check_rights(scope: Scope, admin: bool) -> None:
    """Check that the caller may write. Raises PermissionDeniedError."""
    if scope is Scope.SHARED and not admin:
        raise PermissionDeniedError(f"{ADMINS_ONLY}, or leave 'scope' out.", param="scope")
