"""/v1/context_caches: list, read, change and delete context caches. All of it asks the catalog, so
that the routes run in threads."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Query
from pydantic import Field, model_validator

from kvlinker.base.errors import (
    ContextCacheModelError,
    ContextCacheNotFoundError,
    InvalidRequestError,
)
from kvlinker.base.types.tenants import Scope
from kvlinker.doors.http.context_caches.objects import (
    CACHE_ID,
    ContextCacheList,
    ContextCacheObject,
    Lifetime,
    ScopeQuery,
    describe,
    described,
)
from kvlinker.doors.http.edge.access import CallerParam, TenantParam
from kvlinker.doors.http.edge.bodies import BodyRoute
from kvlinker.doors.http.edge.errors import error_responses
from kvlinker.doors.http.fields.bodies import (
    Metadata,
    MetadataParam,
    Name,
    RequestBody,
    ResponseBody,
    Text,
    exactly_one,
    metadata_parameter,
)
from kvlinker.doors.http.models import ServedModelParam
from kvlinker.doors.http.residency import MOST_SECONDS

MOST_PREFETCHED = 1000
"""The most context caches of one request to prefetch."""

router = APIRouter(prefix="/v1/context_caches", tags=["context caches"], route_class=BodyRoute)


class UpdateContextCacheRequest(Lifetime):
    """Changes to a context cache: absent fields stay as they are. Null removes the end of life, the
    name, all pairs of metadata, or the pin."""

    name: Name | None = None
    metadata: Metadata | None = None
    pinned: bool | None = None

    def changes(self) -> dict[str, Any]:
        """Return the arguments for ``ContextCaches.update``."""
        given = self.model_fields_set
        changed: dict[str, Any] = {}
        if given & {"ttl", "expires_at"}:
            changed["expires_at"] = self.expiry()
        if "name" in given:
            changed["name"] = self.name
        if "metadata" in given:
            changed["metadata"] = self.metadata or {}
        if "pinned" in given:
            changed["pinned"] = bool(self.pinned)
        return changed


class ContextCachePage(ContextCacheList):
    """A page of a listing. ``last_id`` is the next page's ``after``, where ``has_more`` says that
    there is one."""

    first_id: str | None
    last_id: str | None
    has_more: bool


class ContextCacheDeletion(ResponseBody):
    """One context cache was deleted."""

    id: str
    object: Literal["context_cache"] = "context_cache"
    deleted: Literal[True] = True


class ContextCachesDeletion(ResponseBody):
    """The number of context caches that were deleted."""

    object: Literal["context_cache.deletion"] = "context_cache.deletion"
    deleted: int


class PrefetchRequest(RequestBody):
    """Names context caches that will be used, by ``ids`` or by pairs of ``metadata`` that all of
    them have; ``by``: the seconds within which they may still be brought to memory."""

    refuses_unknown: ClassVar[bool] = True

    model_config = exactly_one("ids", "metadata")

    ids: list[Text] | None = Field(default=None, min_length=1, max_length=MOST_PREFETCHED)
    metadata: Metadata | None = Field(default=None, min_length=1)
    by: float = Field(default=30.0, gt=0, le=MOST_SECONDS)

    @model_validator(mode="after")
    def _check_source(self) -> PrefetchRequest:
        if (self.ids is None) == (self.metadata is None):
            raise InvalidRequestError("Give exactly one of 'ids' and 'metadata'.", param="ids")
        return self


class PrefetchAnswer(ResponseBody):
    """The context caches that are meant, and how many chunks are still to be brought to memory."""

    ids: list[str]
    pending: int


@router.post("/prefetch", status_code=202, responses=error_responses(400, 404))
def prefetch_context_caches(
    body: PrefetchRequest, served: ServedModelParam, tenant: TenantParam
) -> PrefetchAnswer:
    """Read the KV of context caches into memory in the background, from slower tiers or by
    computing it, as long as memory has room. Nothing is evicted for them, and it does not count as
    a use."""
    caches = served.llm.caches
    if body.ids is not None:
        try:
            found = tuple(caches.usable(body.ids, tenant=tenant).values())
        except (ContextCacheNotFoundError, ContextCacheModelError) as error:
            error.param = f"ids.{body.ids.index(error.cache_id)}"
            raise
    else:
        page = caches.list(tenant=tenant, limit=MOST_PREFETCHED, metadata=body.metadata)
        found = tuple(cache for cache in page.items if caches.is_usable(cache))
    keys = [cache.chunk_key for cache in found]
    pending = served.llm.agents.preloading.begin(keys, body.by, tenant=tenant)
    return PrefetchAnswer(ids=[cache.id for cache in found], pending=pending)


@router.get("", openapi_extra=metadata_parameter(required=False), responses=error_responses(400))
def list_context_caches(
    served: ServedModelParam,
    tenant: TenantParam,
    metadata: MetadataParam,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(min_length=1)] = None,
    order: Literal["asc", "desc"] = "desc",
    scope: ScopeQuery = Scope.PRIVATE,
) -> ContextCachePage:
    """List a page by time of creation; ``after`` is the last id of the page before.

    Only context caches with all pairs of ``metadata``; the caller's own, or with ``scope=shared``
    the shared ones.
    """
    try:
        items, has_more = served.llm.caches.list(
            tenant=tenant, limit=limit, after=after, order=order, metadata=metadata, scope=scope
        )
    except ContextCacheNotFoundError as error:
        raise InvalidRequestError(
            f"'after' names no context cache: {after!r}.", param="after"
        ) from error
    return ContextCachePage(
        data=described(served, items),
        first_id=items[0].id if items else None,
        last_id=items[-1].id if items else None,
        has_more=has_more,
    )


@router.delete(
    "", openapi_extra=metadata_parameter(required=True), responses=error_responses(400, 403)
)
def delete_context_caches(
    served: ServedModelParam,
    caller: CallerParam,
    metadata: MetadataParam,
    scope: ScopeQuery = Scope.PRIVATE,
) -> ContextCachesDeletion:
    """Delete all context caches with all pairs of ``metadata``, of which there must be one."""
    deleted = served.llm.caches.delete_matching(
        metadata, tenant=caller.tenant, scope=scope, admin=caller.admin
    )
    return ContextCachesDeletion(deleted=deleted)


@router.get(f"/{CACHE_ID}", responses=error_responses(404))
def read_context_cache(
    cache_id: str, served: ServedModelParam, tenant: TenantParam
) -> ContextCacheObject:
    """Read one: the caller's own, or a shared one."""
    return describe(served, served.llm.caches.get(cache_id, tenant=tenant))


@router.patch(f"/{CACHE_ID}", responses=error_responses(400, 403, 404))
def update_context_cache(
    cache_id: str, body: UpdateContextCacheRequest, served: ServedModelParam, caller: CallerParam
) -> ContextCacheObject:
    """Change the given fields; null removes it. Shared ones are changed by admins only."""
    changed = served.llm.caches.update(
        cache_id, tenant=caller.tenant, admin=caller.admin, **body.changes()
    )
    return describe(served, changed)


@router.delete(f"/{CACHE_ID}", responses=error_responses(403, 404))
def delete_context_cache(
    cache_id: str, served: ServedModelParam, caller: CallerParam
) -> ContextCacheDeletion:
    """Delete one. The KV goes when no other context cache holds it. Shared ones are deleted by
    admins only."""
    served.llm.caches.delete(cache_id, tenant=caller.tenant, admin=caller.admin)
    return ContextCacheDeletion(id=cache_id)
