"""/v1/context_caches: read the text of a context cache, and search the texts of all."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field, StringConstraints

from kvlinker.base.types.limits import MAX_QUERY_CHARACTERS
from kvlinker.base.types.tenants import Scope
from kvlinker.doors.http.context_caches.objects import CACHE_ID
from kvlinker.doors.http.edge.access import TenantParam
from kvlinker.doors.http.edge.bodies import BodyRoute
from kvlinker.doors.http.edge.errors import error_responses
from kvlinker.doors.http.fields.bodies import Metadata, RequestBody, ResponseBody, Text
from kvlinker.doors.http.models import ServedModelParam

router = APIRouter(prefix="/v1/context_caches", tags=["context caches"], route_class=BodyRoute)

DEFAULT_HITS = 10


class SearchRequest(RequestBody):
    """Words to search for; only context caches with all pairs of ``metadata`` are found. Absent and
    null mean the default."""

    refuses_unknown: ClassVar[bool] = True

    query: Annotated[Text, StringConstraints(min_length=1, max_length=MAX_QUERY_CHARACTERS)]
    limit: Annotated[int, Field(ge=1, le=100)] | None = None
    metadata: Metadata | None = None
    scope: Literal["private", "shared"] | None = None


class SearchHitObject(ResponseBody):
    """A context cache that was found; ``score`` is BM25's, higher is better."""

    id: str
    score: float
    text: str
    tokens: int
    metadata: dict[str, str]


class SearchHitList(ResponseBody):
    """Context caches that were found, the best match first."""

    object: Literal["list"] = "list"
    data: list[SearchHitObject]


class ContextCacheContent(ResponseBody):
    """The content of a context cache: ``text`` is the decoded ``token_ids``, without special
    tokens."""

    id: str
    object: Literal["context_cache.content"] = "context_cache.content"
    text: str
    token_ids: list[int]
    metadata: dict[str, str]


@router.post("/search", responses=error_responses(400))
def search_context_caches(
    body: SearchRequest, served: ServedModelParam, tenant: TenantParam
) -> SearchHitList:
    """Find context caches by words of their texts (BM25): the caller's own, or the shared ones.

    Any of the words may match; nothing in the query is syntax. Context caches of other models are
    not found.
    """
    found = served.llm.caches.search(
        body.query,
        tenant=tenant,
        limit=body.limit or DEFAULT_HITS,
        metadata=body.metadata,
        scope=Scope(body.scope or Scope.PRIVATE),
    )
    return SearchHitList(
        data=[SearchHitObject.model_validate(hit, from_attributes=True) for hit in found]
    )


@router.get(f"/{CACHE_ID}/content", responses=error_responses(400, 404))
def read_content(
    cache_id: str, served: ServedModelParam, tenant: TenantParam
) -> ContextCacheContent:
    """Read the text and the token ids of one: the caller's own, or a shared one."""
    content = served.llm.caches.content(cache_id, tenant=tenant)
    return ContextCacheContent.model_validate(content, from_attributes=True)
