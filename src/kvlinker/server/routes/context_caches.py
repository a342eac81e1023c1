"""/v1/context_caches: create, list, read, change and delete."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.concurrency import run_in_threadpool

from kvlinker.errors import ContextCacheNotFoundError, InvalidRequestError
from kvlinker.server.bodies.context_cache import CreateBody, Split, UpdateBody
from kvlinker.server.service import Service, ServiceParam, TenantParam
from kvlinker.store import ContextCache

router = APIRouter(prefix="/v1/context_caches", tags=["context caches"])


@router.post("")
async def create_context_caches(body: CreateBody, service: ServiceParam, tenant: TenantParam) -> dict[str, Any]:
    """One context cache per chunk, in order, once its KV is computed."""
    service.check_model(body.model)

    def begin() -> asyncio.Future[tuple[ContextCache, ...]]:
        return asyncio.wrap_future(
            service.llm.caches.create(
                _texts(service, body),
                tenant=tenant,
                expires_at=body.expiry(),
                name=body.name,
                metadata=body.metadata,
                context=body.generation_context,
            ),
            loop=loop,
        )

    loop = asyncio.get_running_loop()
    created = await (await run_in_threadpool(begin))
    return {"object": "list", "data": await run_in_threadpool(_bodies, service, created)}


@router.get("")
async def list_context_caches(
    service: ServiceParam,
    tenant: TenantParam,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """A page by time of creation; ``after`` is the last id of the page before."""

    def page() -> dict[str, Any]:
        try:
            items, has_more = service.llm.caches.list(tenant=tenant, limit=limit, after=after, order=order)
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


@router.get("/{cache_id}")
async def read_context_cache(cache_id: str, service: ServiceParam, tenant: TenantParam) -> dict[str, Any]:
    return await run_in_threadpool(lambda: _body(service, service.llm.caches.get(cache_id, tenant=tenant)))


@router.patch("/{cache_id}")
async def update_context_cache(
    cache_id: str, body: UpdateBody, service: ServiceParam, tenant: TenantParam
) -> dict[str, Any]:
    """Change what is given; null removes it."""
    return await run_in_threadpool(
        lambda: _body(service, service.llm.caches.update(cache_id, tenant=tenant, **body.changes()))
    )


@router.delete("/{cache_id}")
async def delete_context_cache(cache_id: str, service: ServiceParam, tenant: TenantParam) -> dict[str, Any]:
    """The KV goes when no other context cache holds it."""
    await run_in_threadpool(service.llm.caches.delete, cache_id, tenant=tenant)
    return {"id": cache_id, "object": "context_cache", "deleted": True}


def _texts(service: Service, body: CreateBody) -> list[str]:
    if body.input is None:
        return body.chunks or []
    split = body.split or Split()
    return list(service.llm.split(body.input, method=split.method, max_tokens=split.max_tokens))


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
    }
