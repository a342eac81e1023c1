"""/v1/context_caches/split: show how a text would be split; creation can split in the same way."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.limits import MAX_CHUNKS, MAX_INPUT_CHARACTERS
from kvlinker.base.types.texts import Piece
from kvlinker.doors.http.edge.access_log import note_tokens
from kvlinker.doors.http.edge.bodies import BodyRoute
from kvlinker.doors.http.edge.errors import error_responses
from kvlinker.doors.http.fields.bodies import NonemptyText, RequestBody, ResponseBody, Text
from kvlinker.doors.http.models import ServedModel, ServedModelParam
from kvlinker.prompting.splitting import MAX_PIECE_TOKENS, splitters

router = APIRouter(prefix="/v1/context_caches", tags=["context caches"], route_class=BodyRoute)


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
