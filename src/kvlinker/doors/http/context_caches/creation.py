"""/v1/context_caches: create context caches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from kvlinker.base.errors import ContextLengthError, InvalidRequestError
from kvlinker.base.types.chunks import GenerationContext
from kvlinker.base.types.context_cache import ContextCache
from kvlinker.base.types.limits import MAX_CHUNKS
from kvlinker.base.types.tenants import Scope
from kvlinker.doors.http.context_caches.objects import ContextCacheList, Lifetime, described
from kvlinker.doors.http.context_caches.splitting import SplitOptions, check_input, pieces_of
from kvlinker.doors.http.edge.access import CallerParam
from kvlinker.doors.http.edge.access_log import note_tokens
from kvlinker.doors.http.edge.bodies import BodyRoute
from kvlinker.doors.http.edge.errors import error_responses
from kvlinker.doors.http.fields.bodies import (
    GIVEN,
    Metadata,
    Name,
    NonemptyText,
    Text,
    exactly_one,
    is_given,
    where,
)
from kvlinker.doors.http.models import ServedModel, ServedModelParam

router = APIRouter(prefix="/v1/context_caches", tags=["context caches"], route_class=BodyRoute)

_Labels = Annotated[
    Annotated[Metadata, Tag("<pairs>")] | Annotated[list[Metadata], Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<pairs>"),
]
"""The metadata of all chunks, or of each."""


class CreateContextCachesRequest(Lifetime):
    """``chunks`` as they are, or ``input`` to be split. Absent and null mean the default."""

    model_config = exactly_one("chunks", "input")

    rules: ClassVar[tuple[dict[str, JsonValue], ...]] = (
        where({"split": GIVEN}, is_given("input")),
        where({"metadata": {"type": "array"}}, is_given("chunks")),
    )

    model: Text | None = None
    chunks: list[NonemptyText] | None = Field(default=None, min_length=1, max_length=MAX_CHUNKS)
    input: NonemptyText | None = None
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
            raise InvalidRequestError(
                "'split' applies to 'input'; 'chunks' are cached as they are.", param="split"
            )
        if isinstance(self.metadata, list) and self.chunks is None:
            raise InvalidRequestError(
                "A list of 'metadata' needs 'chunks', with one entry for each.", param="metadata"
            )
        return self


@router.post("", responses=error_responses(400, 403, 404, 503))
async def create_context_caches(
    body: CreateContextCachesRequest,
    request: Request,
    served: ServedModelParam,
    caller: CallerParam,
) -> ContextCacheList:
    """Create one context cache per chunk, in order; the answer comes once its KV is computed."""
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
    return ContextCacheList(data=await run_in_threadpool(described, served, created))


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
