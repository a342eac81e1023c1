"""/v1/context_caches: list, read, change and delete context caches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.concurrency import run_in_threadpool

from kvlinker.base.errors import ContextCacheNotFoundError, InvalidRequestError
from kvlinker.base.types.tenants import Scope
from kvlinker.doors.http.context_caches.ids import CACHE_ID
from kvlinker.doors.http.context_caches.objects import (
    ContextCacheList,
    ContextCacheObject,
    Lifetime,
    ScopeQuery,
    describe,
    described,
)
from kvlinker.doors.http.edge.access import CallerParam, TenantParam
from kvlinker.doors.http.edge.errors import error_responses
from kvlinker.doors.http.edge.long_bodies import BodyRoute
from kvlinker.doors.http.fields.bodies import (
    Metadata,
    MetadataParam,
    Name,
    ResponseBody,
    metadata_parameter,
)
from kvlinker.doors.http.models import ServedModelParam

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


@router.get("", openapi_extra=metadata_parameter(required=False), responses=error_responses(400))
async def list_context_caches(
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

    def page() -> ContextCachePage:
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

    return await run_in_threadpool(page)


@router.delete(
    "", openapi_extra=metadata_parameter(required=True), responses=error_responses(400, 403)
)
async def delete_context_caches(
    served: ServedModelParam,
    caller: CallerParam,
    metadata: MetadataParam,
    scope: ScopeQuery = Scope.PRIVATE,
) -> ContextCachesDeletion:
    """Delete all context caches with all pairs of ``metadata``, of which there must be one."""

    def delete() -> int:
        return served.llm.caches.delete_matching(
            metadata, tenant=caller.tenant, scope=scope, admin=caller.admin
        )

    return ContextCachesDeletion(deleted=await run_in_threadpool(delete))


@router.get(f"/{CACHE_ID}", responses=error_responses(404))
async def read_context_cache(
    cache_id: str, served: ServedModelParam, tenant: TenantParam
) -> ContextCacheObject:
    """Read one: the caller's own, or a shared one."""
    return await run_in_threadpool(
        lambda: describe(served, served.llm.caches.get(cache_id, tenant=tenant))
    )


@router.patch(f"/{CACHE_ID}", responses=error_responses(400, 403, 404))
async def update_context_cache(
    cache_id: str, body: UpdateContextCacheRequest, served: ServedModelParam, caller: CallerParam
) -> ContextCacheObject:
    """Change what is given; null removes it. Shared ones are changed by admins only."""
    caches = served.llm.caches
    return await run_in_threadpool(
        lambda: describe(
            served,
            caches.update(cache_id, tenant=caller.tenant, admin=caller.admin, **body.changes()),
        )
    )


@router.delete(f"/{CACHE_ID}", responses=error_responses(403, 404))
async def delete_context_cache(
    cache_id: str, served: ServedModelParam, caller: CallerParam
) -> ContextCacheDeletion:
    """Delete one. The KV goes when no other context cache holds it. Shared ones are deleted by
    admins only."""
    await run_in_threadpool(
        served.llm.caches.delete, cache_id, tenant=caller.tenant, admin=caller.admin
    )
    return ContextCacheDeletion(id=cache_id)
