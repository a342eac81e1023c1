"""The library's calls for context caches: create, find, change, read and delete them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvlinker.base.types.chunks import GenerationContext, parse_context
from kvlinker.base.types.tenants import DEFAULT_TENANT, Scope, parse_scope
from kvlinker.base.types.texts import CacheContent, SearchHit
from kvlinker.service.context_caches.caches import CachesUsage, ContextCaches
from kvlinker.service.context_caches.checks import (
    check_limit,
    check_order,
    check_pairs,
    check_query,
    expiry_of,
    id_of,
    texts_of,
)
from kvlinker.service.context_caches.creation import Metadata
from kvlinker.store import UNCHANGED, ContextCache, Page, Unchanged


class ContextCacheCalls:
    """The calls of ``LLM`` about context caches, with the rights of an admin and times that count
    from now."""

    caches: ContextCaches

    def generate_context_cache(
        self,
        chunks: str | Sequence[str],
        *,
        ttl: float | None = None,
        name: str | None = None,
        metadata: Metadata | None = None,
        context: GenerationContext | str | None = None,
        pinned: bool = False,
        scope: Scope | str = Scope.PRIVATE,
        tenant: str = DEFAULT_TENANT,
        progress: bool | None = None,
    ) -> tuple[ContextCache, ...]:
        """Compute and keep the KV of each chunk; the results stand in message content. A string is
        one chunk.

        ``ttl`` is in seconds. ``metadata``: pairs of strings for all, or a list of them, one for
        each. ``pinned``: the KV is not evicted. ``scope``: "shared" lets all tenants use it.
        ``progress`` shows a bar; None: in notebooks. Raises QuotaExceededError and PinLimitError if
        the settings, or the store, have no room for it.
        """
        texts = texts_of(chunks)
        with progress_bar(len(texts), progress) as advance:
            return self.begin_context_caches(
                texts,
                ttl=ttl,
                name=name,
                metadata=metadata,
                context=context,
                pinned=pinned,
                scope=scope,
                tenant=tenant,
                advance=advance,
            ).result()

    def begin_context_caches(
        self,
        texts: Sequence[str],
        *,
        ttl: float | None,
        name: str | None,
        metadata: Metadata | None,
        context: GenerationContext | str | None,
        pinned: bool,
        scope: Scope | str,
        tenant: str,
        advance: Callable[[], object],
    ) -> Future[tuple[ContextCache, ...]]:
        """Begin what ``generate_context_cache`` returns; ``advance`` is called as the KV of each
        text comes, from any thread. It cannot be cancelled."""
        return self.caches.create(
            texts,
            tenant=tenant,
            ttl=ttl,
            name=name,
            metadata=metadata,
            context=None if context is None else parse_context(context),
            pinned=pinned,
            scope=parse_scope(scope),
            admin=True,
            advance=advance,
        )

    def expire_cache(self, cache: ContextCache | str, *, tenant: str | None = None) -> None:
        """Delete a context cache; its KV goes when no other holds it. ``tenant``: by default the
        owner of the ``ContextCache`` that is given. Raises ContextCacheNotFoundError."""
        self.caches.delete(id_of(cache), tenant=_tenant_of(cache, tenant), admin=True)

    def expire_caches(
        self,
        metadata: Mapping[str, str],
        *,
        scope: Scope | str = Scope.PRIVATE,
        tenant: str = DEFAULT_TENANT,
    ) -> int:
        """Delete all context caches that have all these pairs of metadata; returns how many."""
        check_pairs(metadata)
        return self.caches.delete_matching(
            metadata, tenant=tenant, scope=parse_scope(scope), admin=True
        )

    def update_cache(
        self,
        cache: ContextCache | str,
        *,
        ttl: float | Unchanged | None = UNCHANGED,
        name: str | Unchanged | None = UNCHANGED,
        metadata: Mapping[str, str] | Unchanged = UNCHANGED,
        pinned: bool | Unchanged = UNCHANGED,
        tenant: str | None = None,
    ) -> ContextCache:
        """Change the given fields. ``ttl`` counts seconds from now; None: it lives until it is
        deleted. ``pinned``: its KV is not evicted. ``tenant``: as in ``expire_cache``. Raises
        ContextCacheNotFoundError and PinLimitError."""
        return self.caches.update(
            id_of(cache),
            tenant=_tenant_of(cache, tenant),
            expires_at=ttl if ttl is None or isinstance(ttl, Unchanged) else expiry_of(ttl),
            name=name,
            metadata=metadata,
            pinned=pinned,
            admin=True,
        )

    def list_caches(
        self,
        *,
        limit: int = 20,
        after: ContextCache | str | None = None,
        order: Literal["asc", "desc"] = "desc",
        metadata: Mapping[str, str] | None = None,
        scope: Scope | str = Scope.PRIVATE,
        tenant: str = DEFAULT_TENANT,
    ) -> Page:
        """List at most ``limit`` context caches by time of creation, after ``after``; ``has_more``
        is true if there are others.

        Only those with all pairs of ``metadata``. ``scope``: the tenant's own, or the shared ones.
        """
        check_limit(limit)
        check_order(order)
        check_pairs(metadata or {})
        after_id = None if after is None else id_of(after)
        return self.caches.list(
            tenant=tenant,
            limit=limit,
            after=after_id,
            order=order,
            metadata=metadata,
            scope=parse_scope(scope),
        )

    def read_cache(self, cache: ContextCache | str, *, tenant: str | None = None) -> CacheContent:
        """Read a context cache's text and token ids. ``tenant``: as in ``expire_cache``. Raises
        ContextCacheNotFoundError."""
        return self.caches.content(id_of(cache), tenant=_tenant_of(cache, tenant))

    def search(
        self,
        query: str,
        *,
        limit: int = 10,
        metadata: Mapping[str, str] | None = None,
        scope: Scope | str = Scope.PRIVATE,
        tenant: str = DEFAULT_TENANT,
    ) -> tuple[SearchHit, ...]:
        """Find context caches by words of their texts (BM25), and with an embedding model also by
        their meaning, the best match first; the hits stand in message content.

        Only those with all pairs of ``metadata``. Nothing in the query is syntax. Raises
        InvalidRequestError for a query without words, and where the settings have search off.
        """
        check_query(query)
        check_limit(limit)
        check_pairs(metadata or {})
        return self.caches.search(
            query, tenant=tenant, limit=limit, metadata=metadata, scope=parse_scope(scope)
        )

    def caches_usage(
        self, *, scope: Scope | str = Scope.PRIVATE, tenant: str = DEFAULT_TENANT
    ) -> CachesUsage:
        """Return the number of context caches, the size of their KV, and the quota."""
        return self.caches.usage(tenant=tenant, scope=parse_scope(scope))


def _tenant_of(cache: ContextCache | str, tenant: str | None) -> str:
    """Return the tenant that a call about a context cache is for: the one that is named, else the
    owner of a private one that is given as it was returned, else the default tenant, who may use
    shared ones."""
    if tenant is not None:
        return tenant
    return (
        cache.tenant
        if isinstance(cache, ContextCache) and cache.scope is Scope.PRIVATE
        else DEFAULT_TENANT
    )


@contextmanager
def progress_bar(chunks: int, shown: bool | None) -> Iterator[Callable[[], None]]:
    """Show a bar on stderr, or in a notebook's cell, until the block ends; what it gives is called
    for each of the ``chunks``, from any thread. ``shown``: None for notebooks alone."""
    console = Console(stderr=True)
    if not (console.is_jupyter if shown is None else shown):
        yield lambda: None
        return
    columns = (TextColumn("caching chunks"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=chunks)
        yield lambda: bar.advance(task)
