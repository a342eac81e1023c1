"""/v1/responses: answer, read and delete; and the length of a prompt."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from kvlinker.base.errors import InvalidRequestError
from kvlinker.doors.http.answers.answering import completion_responses
from kvlinker.doors.http.answers.dialects import respond_in_dialect
from kvlinker.doors.http.edge.access import TenantParam
from kvlinker.doors.http.edge.access_log import note_tokens
from kvlinker.doors.http.edge.bodies import BodyRoute
from kvlinker.doors.http.edge.errors import error_responses
from kvlinker.doors.http.models import ServedModelParam
from kvlinker.doors.http.responses.answers import ResponseAnswer
from kvlinker.doors.http.responses.kept import (
    delete_response,
    keep,
    read_conversation,
    read_input,
    read_response,
)
from kvlinker.doors.http.responses.objects import (
    InputItems,
    InputTokens,
    ResponseDeletion,
    ResponseObject,
    ResponseStreamEvent,
)
from kvlinker.doors.http.responses.requests import ResponsesRequest

router = APIRouter(prefix="/v1/responses", tags=["responses"], route_class=BodyRoute)


def _responses() -> dict[int | str, dict[str, Any]]:
    described = completion_responses(ResponseStreamEvent.__name__, ignores=True)
    described[200]["description"] = (
        "The answer; with `stream`, server-sent events that have the names of their types. A stream"
        " that fails half way ends with an event `response.failed`."
    )
    return described


@router.post("", response_model=ResponseObject, responses=_responses())
async def create_response(
    body: ResponsesRequest, request: Request, served: ServedModelParam, tenant: TenantParam
) -> Response:
    """Answer a conversation that is given as items: all of them, or those that follow on an earlier
    response. The answer is kept for a while, unless `store` is false."""
    served.take(body, request.scope)
    conversation = await served.encoding.run(
        request, lambda: read_conversation(served, body, tenant)
    )
    keeps = body.store is not False and served.settings.response_ttl > 0
    kept = partial(keep, served, body, conversation, tenant=tenant) if keeps else None
    return await respond_in_dialect(
        served,
        request,
        body.translated(conversation.earlier, conversation.items),
        ResponseAnswer(served.llm, body, kept),
        tenant=tenant,
    )


@router.post("/input_tokens", responses=error_responses(400, 404))
async def count_input_tokens(
    body: ResponsesRequest, request: Request, served: ServedModelParam, tenant: TenantParam
) -> InputTokens:
    """Count the tokens of a conversation's prompt. Nothing is answered, cached or kept."""
    served.take(body, request.scope)
    llm = served.llm
    conversation = await served.encoding.run(
        request, lambda: read_conversation(served, body, tenant)
    )
    translation = body.translated(conversation.earlier, conversation.items)
    chat = await served.encoding.run(request, translation.request)
    with translation.renaming():
        served.check_model(chat.model)
        tools = chat.request_tools(llm).tools
        read = await served.encoding.run(
            request, lambda: chat.read(llm, tools, keeps=False, tenant=tenant)
        )
    note_tokens(request.scope, len(read.prompt))
    return InputTokens(input_tokens=len(read.prompt))


@router.get("/{response_id}", response_model=ResponseObject, responses=error_responses(400, 404))
def get_response(
    response_id: str,
    served: ServedModelParam,
    tenant: TenantParam,
    stream: Annotated[bool, Query(description="Kept answers have ended: false.")] = False,
) -> Response:
    """Read a kept answer."""
    if stream:
        raise InvalidRequestError(
            "Kept answers have ended, and are read whole: leave 'stream' out.", param="stream"
        )
    return JSONResponse(read_response(served, response_id, tenant))


@router.delete("/{response_id}", responses=error_responses(404))
def remove_response(
    response_id: str, served: ServedModelParam, tenant: TenantParam
) -> ResponseDeletion:
    """Delete a kept answer with its input. Requests do not go on from it any more, nor from those
    that did."""
    delete_response(served, response_id, tenant)
    return ResponseDeletion(id=response_id)


@router.get("/{response_id}/input_items", responses=error_responses(400, 404))
def list_input_items(
    response_id: str,
    served: ServedModelParam,
    tenant: TenantParam,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(min_length=1)] = None,
    order: Literal["asc", "desc"] = "desc",
) -> InputItems:
    """List the items that a kept answer answers, of earlier responses, too; ``after`` is the last
    id of the page before."""
    items = read_input(served, response_id, tenant)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidRequestError(f"'after' names no item: {after!r}.", param="after")
    first = 0 if after is None else ids.index(after) + 1
    page = items[first : first + limit]
    return InputItems(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=first + limit < len(items),
    )
