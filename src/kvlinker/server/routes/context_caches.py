"""/v1/context_caches: create, list, read, change and delete."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool

from kvlinker.errors import ContextCacheNotFoundError, InvalidRequestError
from kvlinker.server.bodies.context_cache import CreateBody, Split, UpdateBody
from kvlinker.server.metadata_query import METADATA_PARAMETER, MetadataParam
from kvlinker.server.service import CallerParam, Service, ServiceParam, TenantParam
from kvlinker.store import ContextCache, TierUsage
from kvlinker.types.tenants import Scope

router = APIRouter(prefix="/v1/context_caches", tags=["context caches"])

ScopeQuery = Annotated[Scope, Query(description="The caller's own, or the shared ones.")]


@router.post("")
async def create_context_caches(body: CreateBody, service: ServiceParam, caller: CallerParam) -> dict[str, Any]:
    """One context cache per chunk, in order, once its KV is computed."""
    service.check_model(body.model)

    def begin() -> asyncio.Future[tuple[ContextCache, ...]]:
        return asyncio.wrap_future(
            service.llm.caches.create(
                _texts(service, body),
                tenant=caller.tenant,
                admin=caller.admin,
                expires_at=body.expiry(),
                name=body.name,
                metadata=body.metadata,
                context=body.generation_context,
                pinned=body.pinned,
                scope=Scope(body.scope),
            ),
            loop=loop,
        )

    loop = asyncio.get_running_loop()
    created = await (await run_in_threadpool(begin))
    return {"object": "list", "data": await run_in_threadpool(_bodies, service, created)}


@router.get("", openapi_extra=METADATA_PARAMETER)
async def list_context_caches(
    service: ServiceParam,
    tenant: TenantParam,
    metadata: MetadataParam,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
    scope: ScopeQuery = Scope.PRIVATE,
) -> dict[str, Any]:
    """A page by time of creation; ``after`` is the last id of the page before.

    Only context caches with all pairs of ``metadata``; the caller's own, or with ``scope=shared`` the shared ones.
    """

    def page() -> dict[str, Any]:
        try:
            items, has_more = service.llm.caches.list(
                tenant=tenant, limit=limit, after=after, order=order, metadata=metadata, scope=scope
            )
        except ContextCacheNotFoundError as error:
            raise InvalidRequestError(f"'after' names no context cache: {after!r}.", param="after") from error
        return {
            "object": "list",
            "data": _bodies(service, items),
            "first_id": items[0].id if items else None,
            "last_id": items[-1].id if items else None,
            "has_more": has_more,
        }

    return await run_in_threadpool(page)


@router.delete("", openapi_extra=METADATA_PARAMETER)
async def delete_context_caches(
    request: Request,
    service: ServiceParam,
    caller: CallerParam,
    metadata: MetadataParam,
    scope: ScopeQuery = Scope.PRIVATE,
) -> dict[str, Any]:
    """Delete all context caches with all pairs of ``metadata``, of which there must be one."""
    strangers = [name for name in request.query_params if name != "scope" and not name.startswith("metadata[")]
    if strangers:
        raise InvalidRequestError(
            f"Deleting takes 'metadata[key]' and 'scope', not {strangers[0]!r}.",
            param=strangers[0],
            code="unknown_parameter",
        )

    def delete() -> int:
        return service.llm.caches.delete_matching(metadata, tenant=caller.tenant, scope=scope, admin=caller.admin)

    return {"object": "context_cache.deletion", "deleted": await run_in_threadpool(delete)}


@router.get("/usage")
async def read_usage(service: ServiceParam, tenant: TenantParam, scope: ScopeQuery = Scope.PRIVATE) -> dict[str, Any]:
    """What the caller's context caches, or the shared ones, take, and the quota."""
    usage = await run_in_threadpool(lambda: service.llm.caches.usage(tenant=tenant, scope=scope))
    return {
        "object": "context_cache.usage",
        "scope": scope,
        "caches": usage.kept.caches,
        "chunks": usage.kept.chunks,
        "tokens": usage.kept.tokens,
        "bytes": usage.kept.bytes,
        "pinned_bytes": usage.pinned_bytes,
        "quota": asdict(usage.quota),
        "tiers": [_tier_body(tier) for tier in usage.tiers],
    }


@router.get("/{cache_id}")
async def read_context_cache(cache_id: str, service: ServiceParam, tenant: TenantParam) -> dict[str, Any]:
    return await run_in_threadpool(lambda: _body(service, service.llm.caches.get(cache_id, tenant=tenant)))


@router.patch("/{cache_id}")
async def update_context_cache(
    cache_id: str, body: UpdateBody, service: ServiceParam, caller: CallerParam
) -> dict[str, Any]:
    """Change what is given; null removes it. Shared ones are changed by admins only."""
    caches = service.llm.caches
    return await run_in_threadpool(
        lambda: _body(service, caches.update(cache_id, tenant=caller.tenant, admin=caller.admin, **body.changes()))
    )


@router.delete("/{cache_id}")
async def delete_context_cache(cache_id: str, service: ServiceParam, caller: CallerParam) -> dict[str, Any]:
    """The KV goes when no other context cache holds it. Shared ones are deleted by admins only."""
    await run_in_threadpool(service.llm.caches.delete, cache_id, tenant=caller.tenant, admin=caller.admin)
    return {"id": cache_id, "object": "context_cache", "deleted": True}


def _texts(service: Service, body: CreateBody) -> list[str]:
    if body.input is None:
        return body.chunks or []
    split = body.split or Split()
    return list(service.llm.split(body.input, method=split.method, max_tokens=split.max_tokens))


def _tier_body(tier: TierUsage) -> dict[str, Any]:
    """Null, not 0, where nobody knows."""
    return {
        "name": tier.name,
        "bytes": tier.used_bytes if tier.reachable else None,
        "chunks": tier.chunks if tier.reachable else None,
        "reachable": tier.reachable,
    }


def _bodies(service: Service, caches: Sequence[ContextCache]) -> list[dict[str, Any]]:
    return [_body(service, cache) for cache in caches]


def _body(service: Service, cache: ContextCache) -> dict[str, Any]:
    return {
        "id": cache.id,
        "object": "context_cache",
        "model": cache.model,
        "name": cache.name,
        "tokens": cache.tokens,
        "bytes": service.llm.caches.nbytes(cache),
        "tier": service.llm.caches.tier(cache),
        "created_at": int(cache.created_at),
        "expires_at": None if cache.expires_at is None else int(cache.expires_at),
        "metadata": dict(cache.metadata),
        "pinned": cache.pinned,
        "scope": cache.scope,
    }
