"""/v1/context_caches: create, list, read, change and delete context caches, and the caller's usage
of them. Routes that ask the catalog run in threads."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError
from starlette.convertors import StringConvertor, register_url_convertor

from kvlinker.base.errors import (
    ContextCacheModelError,
    ContextCacheNotFoundError,
    ContextLengthError,
    InvalidRequestError,
)
from kvlinker.base.types.chunks import END_OF_TIME, MAX_TTL, ContextCache, GenerationContext
from kvlinker.base.types.limits import MAX_CHUNKS
from kvlinker.base.types.tenants import Scope
from kvlinker.doors.http.context_caches.texts import SplitOptions, check_input, pieces_of
from kvlinker.doors.http.edge.access_log import note_tokens
from kvlinker.doors.http.edge.errors import error_responses
from kvlinker.doors.http.edge.guards import CallerParam, TenantParam
from kvlinker.doors.http.fields.bodies import (
    Metadata,
    MetadataParam,
    Name,
    NonemptyText,
    RequestBody,
    ResponseBody,
    Text,
    metadata_parameter,
)
from kvlinker.doors.http.models import BodyRoute, ServedModel, ServedModelParam
from kvlinker.doors.http.residency import MOST_SECONDS

router = APIRouter(prefix="/v1/context_caches", tags=["context caches"], route_class=BodyRoute)


class _CacheIdConvertor(StringConvertor):
    """Takes any segment for an id but the names of neighbouring routes, whose other methods are a
    405, not a 404."""

    regex = r"(?!(?:extract|prefetch|search|split|usage)$)[^/]+"


register_url_convertor("cache_id", _CacheIdConvertor())

CACHE_ID = "{cache_id:cache_id}"
"""The segment of a path that is the parameter ``cache_id``."""

ScopeQuery = Annotated[Scope, Query(description="The caller's own, or the shared ones.")]

_TTL_PATTERN = r"[0-2]?[0-9]{1,9}(\.[0-9]{1,9})?s"
"""Matches a text such as "600s"."""


def _seconds(value: Any) -> Any:
    """Read a ttl, which may be a number, or text such as "600s"."""
    if not isinstance(value, str):
        return value
    if not re.fullmatch(_TTL_PATTERN, value):
        raise PydanticCustomError(
            "ttl_format", 'Input should be a number of seconds, or text such as "600s"'
        )
    return float(value[:-1])


_Ttl = Annotated[
    Annotated[float, Field(gt=0, le=MAX_TTL)] | None,
    BeforeValidator(_seconds),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TTL},
                {"type": "string"},
                {"type": "null"},
            ]
        }
    ),
]


class Lifetime(RequestBody):
    """``ttl`` in seconds from now, or ``expires_at`` in Unix seconds."""

    refuses_unknown: ClassVar[bool] = True

    ttl: _Ttl = None
    expires_at: float | None = Field(default=None, le=END_OF_TIME)

    def check(self) -> None:
        if self.ttl is not None and self.expires_at is not None:
            raise InvalidRequestError("Give 'ttl' or 'expires_at', not both.", param="expires_at")
        if self.expires_at is not None and self.expires_at <= time.time():
            raise InvalidRequestError(
                f"'expires_at' is in the past: {self.expires_at:.0f}. It takes Unix seconds.",
                param="expires_at",
            )

    def expiry(self) -> float | None:
        """Return the end of life in Unix seconds; None for never."""
        return self.expires_at if self.ttl is None else time.time() + self.ttl


class ContextCacheObject(ResponseBody):
    """A context cache. ``bytes`` is the size of its KV, and ``tier`` its current place: 0 and null
    while it is evicted.

    ``usable`` is false if it was made with another model, or other weights, than are served now.
    ``implicit`` is true if a prompt's text became this context cache; each use prolongs its life.
    """

    id: str
    object: Literal["context_cache"] = "context_cache"
    model: str
    name: str | None
    tokens: int
    bytes: int
    tier: str | None
    created_at: int
    expires_at: int | None
    metadata: dict[str, str]
    pinned: bool
    scope: Scope
    usable: bool
    implicit: bool
    contextual: bool


class ContextCacheList(ResponseBody):
    """Context caches in the order in which their chunks were given."""

    object: Literal["list"] = "list"
    data: list[ContextCacheObject]


def describe_all(served: ServedModel, caches: Sequence[ContextCache]) -> list[ContextCacheObject]:
    """Describe context caches as they are answered; asks the store where their KV lies."""
    return [describe(served, cache) for cache in caches]


def describe(served: ServedModel, cache: ContextCache) -> ContextCacheObject:
    """Describe one context cache as it is answered; asks the store where its KV lies."""
    return ContextCacheObject(
        id=cache.id,
        model=cache.model,
        name=cache.name,
        tokens=cache.tokens,
        bytes=served.llm.caches.nbytes(cache),
        tier=served.llm.caches.tier(cache),
        created_at=int(cache.created_at),
        expires_at=None if cache.expires_at is None else int(cache.expires_at),
        metadata=dict(cache.metadata),
        pinned=cache.pinned,
        scope=cache.scope,
        usable=served.llm.caches.is_usable(cache),
        implicit=cache.implicit_ttl is not None,
        contextual=cache.chunk.contextual,
    )


_Labels = Annotated[
    Annotated[Metadata, Tag("<pairs>")] | Annotated[list[Metadata], Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<pairs>"),
]
"""The metadata of all chunks, or of each."""


class CreateContextCachesRequest(Lifetime):
    """``chunks`` as they are, or ``input`` to be split. Absent and null mean the default."""

    model: Text | None = None
    chunks: list[NonemptyText] | None = Field(default=None, min_length=1, max_length=MAX_CHUNKS)
    input: NonemptyText | None = None
    split: SplitOptions | None = None
    name: Name | None = None
    metadata: _Labels | None = None
    context: Literal["alone", "bos", "prefix"] | None = None
    pinned: bool | None = None
    scope: Literal["private", "shared"] | None = None

    def check(self) -> None:
        super().check()
        if (self.chunks is None) == (self.input is None):
            raise InvalidRequestError("Give either 'chunks' or 'input'.", param="chunks")
        if self.input is not None:
            check_input(self.input)
        if self.split is not None and self.input is None:
            raise InvalidRequestError(
                "'split' applies to 'input'; 'chunks' are cached as they are.", param="split"
            )
        if isinstance(self.metadata, list) and self.chunks is None:
            raise InvalidRequestError(
                "A list of 'metadata' needs 'chunks', with one entry for each.", param="metadata"
            )


@router.post("", responses=error_responses(400, 403, 404, 503))
async def create_context_caches(
    body: CreateContextCachesRequest,
    request: Request,
    served: ServedModelParam,
    caller: CallerParam,
) -> ContextCacheList:
    """Create one context cache per chunk, in order. The answer is sent when the chunks' KV is
    computed."""
    served.check_model(body.model)
    loop = asyncio.get_running_loop()

    def begin() -> asyncio.Future[tuple[ContextCache, ...]]:
        with _blaming_split(body):
            return asyncio.wrap_future(
                served.llm.caches.create(
                    _texts(served, body),
                    tenant=caller.tenant,
                    admin=caller.admin,
                    expires_at=body.expires_at,
                    ttl=body.ttl,
                    name=body.name,
                    metadata=body.metadata,
                    context=GenerationContext(body.context) if body.context else None,
                    pinned=bool(body.pinned),
                    scope=Scope(body.scope or Scope.PRIVATE),
                ),
                loop=loop,
            )

    created = await (await served.encoding.run(request, begin))
    note_tokens(request.scope, sum(cache.tokens for cache in created))
    return ContextCacheList(data=await run_in_threadpool(describe_all, served, created))


def _texts(served: ServedModel, body: CreateContextCachesRequest) -> list[str]:
    if body.input is None:
        return body.chunks or []
    return [piece.text for piece in pieces_of(served, body.input, body.split)]


@contextmanager
def _blaming_split(body: CreateContextCachesRequest) -> Iterator[None]:
    """Name the responsible field in an error about a chunk that is too long: where ``input`` was
    split, the limit."""
    try:
        yield
    except ContextLengthError as error:
        if body.input is None:
            raise
        raise ContextLengthError(
            f"{error.message.partition('.')[0]}. Allow fewer tokens in 'split.max_tokens'.",
            param="split.max_tokens",
        ) from error


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


MOST_PREFETCHED = 1000
"""The most context caches of one request to prefetch."""


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
    """A page of a listing. If ``has_more`` is true, ``last_id`` is the next page's ``after``."""

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
    them have. ``by``: the seconds within which they may still be loaded into memory."""

    refuses_unknown: ClassVar[bool] = True

    ids: list[Text] | None = Field(default=None, min_length=1, max_length=MOST_PREFETCHED)
    metadata: Metadata | None = Field(default=None, min_length=1)
    by: float = Field(default=30.0, gt=0, le=MOST_SECONDS)

    def check(self) -> None:
        if (self.ids is None) == (self.metadata is None):
            raise InvalidRequestError("Give exactly one of 'ids' and 'metadata'.", param="ids")


class PrefetchAnswer(ResponseBody):
    """The named context caches, and the number of chunks that are still to be loaded into
    memory."""

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
    """List a page by time of creation; ``after`` is the last id of the page before. Lists context
    caches with all pairs of ``metadata``: the caller's own, or with ``scope=shared`` the shared
    ones."""
    try:
        items, has_more = served.llm.caches.list(
            tenant=tenant, limit=limit, after=after, order=order, metadata=metadata, scope=scope
        )
    except ContextCacheNotFoundError as error:
        raise InvalidRequestError(
            f"'after' names no context cache: {after!r}.", param="after"
        ) from error
    return ContextCachePage(
        data=describe_all(served, items),
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
    """Change the given fields; null removes a field. Only admins change shared context caches."""
    changed = served.llm.caches.update(
        cache_id, tenant=caller.tenant, admin=caller.admin, **body.changes()
    )
    return describe(served, changed)


@router.delete(f"/{CACHE_ID}", responses=error_responses(403, 404))
def delete_context_cache(
    cache_id: str, served: ServedModelParam, caller: CallerParam
) -> ContextCacheDeletion:
    """Delete one. Its KV is deleted when no other context cache has the same chunk. Only admins
    delete shared ones."""
    served.llm.caches.delete(cache_id, tenant=caller.tenant, admin=caller.admin)
    return ContextCacheDeletion(id=cache_id)


class ContextCacheContent(ResponseBody):
    """The content of a context cache: ``text`` is the decoded ``token_ids``, without special
    tokens."""

    id: str
    object: Literal["context_cache.content"] = "context_cache.content"
    text: str
    token_ids: list[int]
    metadata: dict[str, str]


@router.get(f"/{CACHE_ID}/content", responses=error_responses(400, 404))
def read_content(
    cache_id: str, served: ServedModelParam, tenant: TenantParam
) -> ContextCacheContent:
    """Read the text and the token ids of one: the caller's own, or a shared one."""
    content = served.llm.caches.content(cache_id, tenant=tenant)
    return ContextCacheContent.model_validate(content, from_attributes=True)
