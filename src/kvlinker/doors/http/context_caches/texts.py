"""/v1/context_caches/search, split and extract: find context caches by their texts, and show how a
text would be split, or what text a file has. Nothing is cached."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, StringConstraints

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.limits import MAX_CHUNKS, MAX_INPUT_CHARACTERS, MAX_QUERY_CHARACTERS
from kvlinker.base.types.tenants import Scope
from kvlinker.base.types.texts import Piece
from kvlinker.doors.http.edge.access_log import note_tokens
from kvlinker.doors.http.edge.errors import error_responses
from kvlinker.doors.http.edge.guards import TenantParam
from kvlinker.doors.http.fields.bodies import (
    Metadata,
    NonemptyText,
    RequestBody,
    ResponseBody,
    Text,
    Unicode,
)
from kvlinker.doors.http.models import BodyRoute, ServedModel, ServedModelParam
from kvlinker.prompting.documents import CONVERTERS, NoTextError, read_document
from kvlinker.prompting.splitting import MAX_PIECE_TOKENS, splitters

router = APIRouter(prefix="/v1/context_caches", tags=["context caches"], route_class=BodyRoute)

DEFAULT_HITS = 10


class SearchRequest(RequestBody):
    """Words to search for. Only context caches with all pairs of ``metadata`` are found. Absent and
    null mean the default."""

    refuses_unknown: ClassVar[bool] = True

    query: Annotated[str, StringConstraints(min_length=1, max_length=MAX_QUERY_CHARACTERS), Unicode]
    limit: Annotated[int, Field(ge=1, le=100)] | None = None
    metadata: Metadata | None = None
    scope: Literal["private", "shared"] | None = None


class SearchHitObject(ResponseBody):
    """A context cache that was found; ``score``: higher is better, within one answer."""

    id: str
    score: float
    text: str
    tokens: int
    metadata: dict[str, str]


class SearchHitList(ResponseBody):
    """Context caches that were found, the best match first."""

    object: Literal["list"] = "list"
    data: list[SearchHitObject]


@router.post("/search", responses=error_responses(400))
def search_context_caches(
    body: SearchRequest, served: ServedModelParam, tenant: TenantParam
) -> SearchHitList:
    """Find context caches by words of their texts: the caller's own, or the shared ones.

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


def _list_splitters(schema: dict[str, Any]) -> None:
    """List in the schema the splitters that are registered when it is requested."""
    schema["enum"] = list(splitters())


class SplitOptions(RequestBody):
    """Options of cutting a text into chunks (EPIC's KVSplit): ``passage`` and 512 tokens unless
    they say otherwise."""

    refuses_unknown: ClassVar[bool] = True

    method: Annotated[Text, Field(json_schema_extra=_list_splitters)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_PIECE_TOKENS)] | None = None


_NAMES = {"text": "input", "method": "split.method", "max_tokens": "split.max_tokens"}
"""The fields of bodies by the arguments of ``LLM.split_pieces``."""


def pieces_of(served: ServedModel, text: str, split: SplitOptions | None) -> tuple[Piece, ...]:
    """Cut the text of a body as its ``split`` says. Raises InvalidRequestError, which names the
    body's field."""
    options = {} if split is None else split.model_dump(exclude_none=True)
    try:
        return served.llm.split_pieces(text, most_pieces=MAX_CHUNKS, **options)
    except InvalidRequestError as error:
        error.param = _NAMES.get(error.param or "", error.param)
        raise


def check_input(text: str) -> None:
    """Check the length of a text that is to be split. Raises InvalidRequestError."""
    if len(text) > MAX_INPUT_CHARACTERS:
        raise InvalidRequestError(
            f"'input' has {len(text):,} characters; at most {MAX_INPUT_CHARACTERS:,} are split at"
            " once. Send it in parts.",
            param="input",
        )


class SplitRequest(RequestBody):
    """A text to be split."""

    refuses_unknown: ClassVar[bool] = True

    input: NonemptyText
    split: SplitOptions | None = None


class PieceObject(ResponseBody):
    """A piece of a text: ``start`` and ``end`` count its characters (Unicode code points)."""

    start: int
    end: int
    tokens: int


class PieceList(ResponseBody):
    """The pieces of a text in order; joined, they are the text."""

    object: Literal["list"] = "list"
    data: list[PieceObject]


@router.post("/split", response_model=PieceList, responses=error_responses(400))
async def split_text(body: SplitRequest, request: Request, served: ServedModelParam) -> Response:
    """Return the chunks into which a text would be split; nothing is cached."""
    check_input(body.input)

    def split_input() -> tuple[int, dict[str, Any]]:
        pieces = pieces_of(served, body.input, body.split)
        data = [
            PieceObject(start=piece.start, end=piece.end, tokens=piece.tokens) for piece in pieces
        ]
        return sum(piece.tokens for piece in pieces), PieceList(data=data).model_dump()

    tokens, pieces = await served.encoding.run(request, split_input)
    note_tokens(request.scope, tokens)
    return JSONResponse(pieces)


CONVERSION_SECONDS = 120.0
"""The longest time that a file may take to be converted."""

_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


class ExtractedText(ResponseBody):
    """The text of a file; it is Markdown if the file was converted. ``encoding`` is the guessed
    one, and null for UTF-8 and for converted files. ``digest`` is the SHA-256 of the file's
    content."""

    object: Literal["context_cache.extracted_text"] = "context_cache.extracted_text"
    text: str
    encoding: str | None
    digest: str


@router.post("/extract", openapi_extra=_BODY, responses=error_responses(400))
async def extract_text(
    request: Request, served: ServedModelParam, name: Annotated[str, Query(max_length=4096)]
) -> ExtractedText:
    """Extract the text of a file, which is the body: decoded from its encoding, or converted from
    PDF, HTML, DOCX or EPUB, by the end of ``name``. Nothing is cached."""
    content = await request.body()
    suffix = PurePath(name).suffix.lower()
    told = await served.encoding.run_long(lambda: _text_of(content, suffix))
    return ExtractedText(**told, digest=hashlib.sha256(content).hexdigest())


def _text_of(content: bytes, suffix: str) -> dict[str, Any]:
    """Return text and encoding. Raises InvalidRequestError, which says why there is no text."""
    if suffix in CONVERTERS:
        told = _converted(content, suffix)
    else:
        try:
            found = read_document(content, suffix)
            told = {"text": found.text, "encoding": found.encoding}
        except NoTextError as error:
            told = {"no_text": str(error)}
    if "no_text" in told:
        raise InvalidRequestError(f"There is no text to cache: {told['no_text']}.", code="no_text")
    return told


def _converted(content: bytes, suffix: str) -> dict[str, Any]:
    """Convert in a process of its own, which a file that takes for ever, or all memory, does not
    outlive."""
    command = [sys.executable, "-m", "kvlinker.prompting.documents", suffix]
    try:
        ran = subprocess.run(
            command, input=content, capture_output=True, timeout=CONVERSION_SECONDS, check=True
        )
    except subprocess.TimeoutExpired:
        return {"no_text": f"it takes more than {CONVERSION_SECONDS:.0f} s to be read"}
    except subprocess.CalledProcessError:
        return {"no_text": "it takes too much memory to be read"}
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return told
