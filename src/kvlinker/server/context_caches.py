"""/v1/context_caches: create, list, read, change and delete context caches, and report their usage."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from kvlinker.context_caches import MAX_CHUNKS
from kvlinker.errors import ContextCacheNotFoundError, ContextLengthError, InvalidRequestError
from kvlinker.server.access import CallerParam, TenantParam
from kvlinker.server.access_log import note_tokens
from kvlinker.server.bodies import (
    METADATA_PARAMETER,
    Metadata,
    MetadataParam,
    Name,
    RequestBody,
    ResponseBody,
    Text,
    Unicode,
    exactly_one,
)
from kvlinker.server.errors import error_responses
from kvlinker.server.models import Service, ServiceParam
from kvlinker.splitting import splitters
from kvlinker.types.chunks import GenerationContext
from kvlinker.types.context_cache import ContextCache
from kvlinker.types.tenants import Scope

router = APIRouter(prefix="/v1/context_caches", tags=["context caches"])

MAX_INPUT_CHARACTERS = 4 * 2**20
"""The longest text that is split at once: it takes time and memory in proportion."""

MAX_TTL = 100 * 365 * 24 * 3600.0
"""The longest time to live in seconds: a hundred years."""

END_OF_TIME = 253_402_300_799.0
"""The latest time of expiry in Unix seconds: the last second of the year 9999."""

ScopeQuery = Annotated[Scope, Query(description="The caller's own, or the shared ones.")]

_Chunk = Annotated[str, StringConstraints(min_length=1), Unicode]

_Labels = Annotated[
    Annotated[Metadata, Tag("<pairs>")] | Annotated[list[Metadata], Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<pairs>"),
]
"""The metadata of all chunks, or of each."""

_TTL_PATTERN = r"[0-9]{1,12}(\.[0-9]{1,9})?s"


def _seconds(value: Any) -> Any:
    """Read a ttl, which may be a number, or text such as "600s"."""
    if not isinstance(value, str):
        return value
    if not re.fullmatch(_TTL_PATTERN, value):
        raise PydanticCustomError("ttl_format", 'Input should be a number of seconds, or text such as "600s"')
    return float(value[:-1])


_Ttl = Annotated[
    Annotated[float, Field(gt=0, le=MAX_TTL)] | None,
    BeforeValidator(_seconds),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TTL},
                {"type": "string", "pattern": rf"^(?![0.]*s){_TTL_PATTERN}$"},
                {"type": "null"},
            ]
        }
    ),
]


class Lifetime(RequestBody):
    """``ttl`` in seconds from now, or ``expires_at`` in Unix seconds."""

    ttl: _Ttl = None
    expires_at: float | None = Field(default=None, le=END_OF_TIME)

    @model_validator(mode="after")
    def _check_lifetime(self) -> Lifetime:
        if self.ttl is not None and self.expires_at is not None:
            raise InvalidRequestError("Give 'ttl' or 'expires_at', not both.", param="expires_at")
        if self.expires_at is not None and self.expires_at <= time.time():
            raise InvalidRequestError(
                f"'expires_at' is in the past: {self.expires_at:.0f}. It takes Unix seconds.", param="expires_at"
            )
        return self

    def expiry(self) -> float | None:
        """The end of life in Unix seconds; None for never."""
        return self.expires_at if self.ttl is None else time.time() + self.ttl


def check_input(text: str) -> None:
    """Check the length of a text that is to be split. Raises InvalidRequestError."""
    if len(text) > MAX_INPUT_CHARACTERS:
        raise InvalidRequestError(
            f"'input' has {len(text):,} characters; at most {MAX_INPUT_CHARACTERS:,} are split at once. "
            "Send it in parts.",
            param="input",
        )


def _list_splitters(schema: dict[str, Any]) -> None:
    """List in the schema the splitters that are registered when it is requested."""
    schema["enum"] = list(splitters())


class SplitOptions(RequestBody):
    """Options of cutting a text into chunks (EPIC's KVSplit): ``passage`` and 512 tokens unless they say otherwise."""

    method: Annotated[Text, Field(json_schema_extra=_list_splitters)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None

    def given(self) -> dict[str, Any]:
        """Return the options that are given, as arguments for ``LLM.split_pieces``."""
        return self.model_dump(exclude_none=True)


class CreateContextCachesRequest(Lifetime):
    """``chunks`` as they are, or ``input`` to be split. Absent and null mean the default."""

    model_config = exactly_one("chunks", "input")

    model: Text | None = None
    chunks: list[_Chunk] | None = Field(default=None, min_length=1, max_length=MAX_CHUNKS)
    input: _Chunk | None = None
    split: SplitOptions | None = None
    name: Name | None = None
    metadata: _Labels | None = None
    context: Literal["alone", "bos", "prefix"] | None = None
    pinned: bool | None = None
    scope: Literal["private", "shared"] | None = None

    @model_validator(mode="after")
    def _check_source(self) -> CreateContextCachesRequest:
        if (self.chunks is None) == (self.input is None):
            raise InvalidRequestError("Give either 'chunks' or 'input'.", param="chunks")
        if self.input is not None:
            check_input(self.input)
        if self.split is not None and self.input is None:
            raise InvalidRequestError("'split' applies to 'input'; 'chunks' are cached as they are.", param="split")
        if isinstance(self.metadata, list) and self.chunks is None:
            raise InvalidRequestError("A list of 'metadata' goes with 'chunks', one for each.", param="metadata")
        return self

    @property
    def generation_context(self) -> GenerationContext | None:
        """The context that the chunks' KV is computed in; None for the server's default."""
        return None if self.context is None else GenerationContext(self.context)


class UpdateContextCacheRequest(Lifetime):
    """Changes to a context cache: absent fields stay as they are. Null removes the end of life, the name, all pairs of
    metadata, or the pin."""

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


class ContextCacheObject(ResponseBody):
    """A context cache. ``bytes`` and ``tier`` tell where its KV lies now: 0 and null while it was evicted.

    ``usable`` is false where it was made with another model, or other weights, than are served now.
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


class ContextCacheList(ResponseBody):
    """Context caches in the order in which their chunks were given."""

    object: Literal["list"] = "list"
    data: list[ContextCacheObject]


class ContextCachePage(ContextCacheList):
    """A page of a listing. ``last_id`` is the next page's ``after``, where ``has_more`` says that there is one."""

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


class QuotaBody(ResponseBody):
    """Tells how much one tenant may keep; null is no limit."""

    bytes: int | None
    caches: int | None
    pinned_bytes: int | None


class TierShare(ResponseBody):
    """Tells what a tenant's KV takes up in a tier; null where the tier does not answer."""

    name: str
    bytes: int | None
    chunks: int | None
    reachable: bool


class ContextCacheUsage(ResponseBody):
    """Tells what context caches take up. ``tokens`` and ``bytes`` (of KV as computed) count each chunk once."""

    object: Literal["context_cache.usage"] = "context_cache.usage"
    scope: Scope
    caches: int
    chunks: int
    tokens: int
    bytes: int
    pinned_bytes: int
    quota: QuotaBody
    tiers: list[TierShare]


@router.post("", responses=error_responses(400, 403, 404, 503))
async def create_context_caches(
    body: CreateContextCachesRequest, request: Request, service: ServiceParam, caller: CallerParam
) -> ContextCacheList:
    """Create one context cache per chunk, in order; the answer comes once its KV is computed."""
    service.check_model(body.model)
    loop = asyncio.get_running_loop()

    def begin() -> asyncio.Future[tuple[ContextCache, ...]]:
        with _blaming_split(body):
            return asyncio.wrap_future(
                service.llm.caches.create(
                    _texts(service, body),
                    tenant=caller.tenant,
                    admin=caller.admin,
                    expires_at=body.expiry(),
                    name=body.name,
                    metadata=body.metadata,
                    context=body.generation_context,
                    pinned=bool(body.pinned),
                    scope=Scope(body.scope or Scope.PRIVATE),
                ),
                loop=loop,
            )

    created = await (await service.encoding.run(request, begin))
    note_tokens(request.scope, sum(cache.tokens for cache in created))
    return ContextCacheList(data=await run_in_threadpool(_objects, service, created))


@router.get("", openapi_extra=METADATA_PARAMETER, responses=error_responses(400))
async def list_context_caches(
    service: ServiceParam,
    tenant: TenantParam,
    metadata: MetadataParam,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
    scope: ScopeQuery = Scope.PRIVATE,
) -> ContextCachePage:
    """List a page by time of creation; ``after`` is the last id of the page before.

    Only context caches with all pairs of ``metadata``; the caller's own, or with ``scope=shared`` the shared ones.
    """

    def page() -> ContextCachePage:
        try:
            items, has_more = service.llm.caches.list(
                tenant=tenant, limit=limit, after=after, order=order, metadata=metadata, scope=scope
            )
        except ContextCacheNotFoundError as error:
            raise InvalidRequestError(f"'after' names no context cache: {after!r}.", param="after") from error
        return ContextCachePage(
            data=_objects(service, items),
            first_id=items[0].id if items else None,
            last_id=items[-1].id if items else None,
            has_more=has_more,
        )

    return await run_in_threadpool(page)


@router.delete("", openapi_extra=METADATA_PARAMETER, responses=error_responses(400, 403))
async def delete_context_caches(
    service: ServiceParam,
    caller: CallerParam,
    metadata: MetadataParam,
    scope: ScopeQuery = Scope.PRIVATE,
) -> ContextCachesDeletion:
    """Delete all context caches with all pairs of ``metadata``, of which there must be one."""

    def delete() -> int:
        return service.llm.caches.delete_matching(metadata, tenant=caller.tenant, scope=scope, admin=caller.admin)

    return ContextCachesDeletion(deleted=await run_in_threadpool(delete))


@router.get("/usage", responses=error_responses(400))
async def read_usage(
    service: ServiceParam, tenant: TenantParam, scope: ScopeQuery = Scope.PRIVATE
) -> ContextCacheUsage:
    """Tell what the caller's context caches, or the shared ones, take, and the quota."""
    usage = await run_in_threadpool(lambda: service.llm.caches.usage(tenant=tenant, scope=scope))
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


@router.get("/{cache_id}", responses=error_responses(404))
async def read_context_cache(cache_id: str, service: ServiceParam, tenant: TenantParam) -> ContextCacheObject:
    """Read one: the caller's own, or a shared one."""
    return await run_in_threadpool(lambda: _object(service, service.llm.caches.get(cache_id, tenant=tenant)))


@router.patch("/{cache_id}", responses=error_responses(400, 403, 404))
async def update_context_cache(
    cache_id: str, body: UpdateContextCacheRequest, service: ServiceParam, caller: CallerParam
) -> ContextCacheObject:
    """Change what is given; null removes it. Shared ones are changed by admins only."""
    caches = service.llm.caches
    return await run_in_threadpool(
        lambda: _object(service, caches.update(cache_id, tenant=caller.tenant, admin=caller.admin, **body.changes()))
    )


@router.delete("/{cache_id}", responses=error_responses(403, 404))
async def delete_context_cache(cache_id: str, service: ServiceParam, caller: CallerParam) -> ContextCacheDeletion:
    """Delete one. The KV goes when no other context cache holds it. Shared ones are deleted by admins only."""
    await run_in_threadpool(service.llm.caches.delete, cache_id, tenant=caller.tenant, admin=caller.admin)
    return ContextCacheDeletion(id=cache_id)


def _texts(service: Service, body: CreateContextCachesRequest) -> list[str]:
    if body.input is None:
        return body.chunks or []
    split = body.split or SplitOptions()
    pieces = service.llm.split(body.input, **split.given())
    if len(pieces) > MAX_CHUNKS:
        raise InvalidRequestError(
            f"'input' makes {len(pieces):,} chunks; at most {MAX_CHUNKS:,} are created at once. Send it in parts, or "
            "allow chunks of more tokens.",
            param="input",
        )
    return list(pieces)


@contextmanager
def _blaming_split(body: CreateContextCachesRequest) -> Iterator[None]:
    """Have an error about a chunk that is too long name what made it so long: where ``input`` was split, the limit."""
    try:
        yield
    except ContextLengthError as error:
        if body.input is None:
            raise
        raise ContextLengthError(
            f"{error.message.partition('.')[0]}. Allow fewer tokens in 'split.max_tokens'.", param="split.max_tokens"
        ) from error


def _objects(service: Service, caches: Sequence[ContextCache]) -> list[ContextCacheObject]:
    return [_object(service, cache) for cache in caches]


def _object(service: Service, cache: ContextCache) -> ContextCacheObject:
    return ContextCacheObject(
        id=cache.id,
        model=cache.model,
        name=cache.name,
        tokens=cache.tokens,
        bytes=service.llm.caches.nbytes(cache),
        tier=service.llm.caches.tier(cache),
        created_at=int(cache.created_at),
        expires_at=None if cache.expires_at is None else int(cache.expires_at),
        metadata=dict(cache.metadata),
        pinned=cache.pinned,
        scope=cache.scope,
        usable=service.llm.caches.is_usable(cache),
    )
