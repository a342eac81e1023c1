"""/v1/context_caches/usage: the caller's usage and limits."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter

from kvlinker.base.types.tenants import Scope
from kvlinker.doors.http.context_caches.objects import ScopeQuery
from kvlinker.doors.http.edge.access import TenantParam
from kvlinker.doors.http.edge.errors import error_responses
from kvlinker.doors.http.fields.bodies import ResponseBody
from kvlinker.doors.http.models import ServedModelParam

router = APIRouter(prefix="/v1/context_caches", tags=["context caches"])


class QuotaBody(ResponseBody):
    """The limits of one tenant; null is no limit."""

    bytes: int | None
    caches: int | None
    pinned_bytes: int | None


class TierShare(ResponseBody):
    """The size of a tenant's KV in a tier; null if the tier does not answer."""

    name: str
    bytes: int | None
    chunks: int | None
    reachable: bool


class ContextCacheUsage(ResponseBody):
    """The usage of context caches. ``tokens`` and ``bytes`` (of KV as computed) count each chunk
    once."""

    object: Literal["context_cache.usage"] = "context_cache.usage"
    scope: Scope
    caches: int
    chunks: int
    tokens: int
    bytes: int
    pinned_bytes: int
    quota: QuotaBody
    tiers: list[TierShare]


@router.get("/usage", responses=error_responses(400))
def read_usage(
    served: ServedModelParam, tenant: TenantParam, scope: ScopeQuery = Scope.PRIVATE
) -> ContextCacheUsage:
    """Return the usage of the caller's context caches, or of the shared ones, and the quota."""
    usage = served.llm.caches.usage(tenant=tenant, scope=scope)
    quota = usage.quota
    return ContextCacheUsage(
        scope=scope,
        caches=usage.kept.caches,
        chunks=usage.kept.chunks,
        tokens=usage.kept.tokens,
        bytes=usage.kept.bytes,
        pinned_bytes=usage.pinned_bytes,
        quota=QuotaBody(bytes=quota.bytes, caches=quota.caches, pinned_bytes=quota.pinned_bytes),
        tiers=[
            TierShare(
                name=tier.name,
                bytes=tier.used_bytes if tier.reachable else None,
                chunks=tier.chunks if tier.reachable else None,
                reachable=tier.reachable,
            )
            for tier in usage.tiers
        ],
    )
