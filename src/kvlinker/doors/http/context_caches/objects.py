"""Parts that several routes of context caches share: the id in a path, the object as answered, and
the lifetime as requested."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Query
from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, WithJsonSchema, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError
from starlette.convertors import StringConvertor, register_url_convertor

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.context_cache import END_OF_TIME, MAX_TTL, ContextCache
from kvlinker.base.types.tenants import Scope
from kvlinker.doors.http.fields.bodies import RequestBody, ResponseBody, is_given
from kvlinker.doors.http.models import ServedModel


class _CacheIdConvertor(StringConvertor):
    """Takes any segment for an id but the names of neighbouring routes, whose other methods are a
    405, not a 404."""

    regex = r"(?!(?:extract|prefetch|search|split|usage)$)[^/]+"


register_url_convertor("cache_id", _CacheIdConvertor())

CACHE_ID = "{cache_id:cache_id}"
"""The segment of a path that is the parameter ``cache_id``."""

ScopeQuery = Annotated[Scope, Query(description="The caller's own, or the shared ones.")]

_TTL_PATTERN = r"[0-2]?[0-9]{1,9}(\.[0-9]{1,9})?s"
"""Text such as "600s". Its ten digits stay below ``MAX_TTL``, so that the pattern is all that there
is to know."""


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
                {"type": "string", "pattern": rf"^(?![0.]*s){_TTL_PATTERN}$"},
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

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = super().__get_pydantic_json_schema__(core, handler)
        handler.resolve_ref_schema(schema)["not"] = is_given("ttl", "expires_at")
        return schema

    @model_validator(mode="after")
    def _check_lifetime(self) -> Lifetime:
        if self.ttl is not None and self.expires_at is not None:
            raise InvalidRequestError("Give 'ttl' or 'expires_at', not both.", param="expires_at")
        if self.expires_at is not None and self.expires_at <= time.time():
            raise InvalidRequestError(
                f"'expires_at' is in the past: {self.expires_at:.0f}. It takes Unix seconds.",
                param="expires_at",
            )
        return self

    def expiry(self) -> float | None:
        """Return the end of life in Unix seconds; None for never."""
        return self.expires_at if self.ttl is None else time.time() + self.ttl


class ContextCacheObject(ResponseBody):
    """A context cache. ``bytes`` is the size of its KV, and ``tier`` its current place: 0 and null
    while it is evicted.

    ``usable`` is false if it was made with another model, or other weights, than are served now;
    ``implicit`` is true for one that a prompt's text brought, which lives on with every use.
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


def described(served: ServedModel, caches: Sequence[ContextCache]) -> list[ContextCacheObject]:
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
