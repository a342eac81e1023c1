"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from kvlinker.doors.http.answers.answering import completion_responses
from kvlinker.doors.http.answers.dialects import respond_in_dialect
from kvlinker.doors.http.edge.access import TenantParam
from kvlinker.doors.http.edge.access_log import note_tokens
from kvlinker.doors.http.edge.bodies import BodyRoute
from kvlinker.doors.http.edge.errors import error_responses
from kvlinker.doors.http.fields.bodies import ResponseBody
from kvlinker.doors.http.messages.answers import MessageAnswer, MessageObject, MessageStreamEvent
from kvlinker.doors.http.messages.errors import MessagesError
from kvlinker.doors.http.messages.requests import CountTokensRequest, MessagesRequest
from kvlinker.doors.http.models import ServedModelParam


async def _beta(
    beta: Annotated[str | None, Query(description="Means nothing; clients send it along.")] = None,
) -> None:
    """Take a parameter that clients send along."""


router = APIRouter(tags=["messages"], dependencies=[Depends(_beta)], route_class=BodyRoute)


class TokenCount(ResponseBody):
    """The length of a prompt."""

    input_tokens: int


def _responses() -> dict[int | str, dict[str, Any]]:
    answered = completion_responses(MessageStreamEvent.__name__, ignores=True)[200]
    answered = answered | {
        "description": (
            "The answer; with `stream`, server-sent events that have the names of their types. A"
            " stream that fails half way ends with an event `error`."
        )
    }
    return {200: answered, **error_responses(400, 404, 429, 503, model=MessagesError)}


@router.post("/v1/messages", response_model=MessageObject, responses=_responses())
async def create_message(
    body: MessagesRequest, request: Request, served: ServedModelParam, tenant: TenantParam
) -> Response:
    """Answer a conversation, in Anthropic's words; content mixes text, context caches, and results
    of tools."""
    served.take(body, request.scope)
    answer = MessageAnswer(served.llm, body.request_id)
    return await respond_in_dialect(served, request, body.translated(), answer, tenant=tenant)


@router.post("/v1/messages/count_tokens", responses=error_responses(400, 404, model=MessagesError))
async def count_tokens(
    body: CountTokensRequest, request: Request, served: ServedModelParam, tenant: TenantParam
) -> TokenCount:
    """Count the tokens of a conversation's prompt. Nothing is cached."""
    served.take(body, request.scope)
    llm = served.llm
    translation = body.translated()
    chat = await served.encoding.run(request, translation.request)
    with translation.renaming():
        served.check_model(chat.model)
        tools = chat.request_tools(llm).tools
        read = await served.encoding.run(
            request, lambda: chat.read(llm, tools, keeps=False, tenant=tenant)
        )
    note_tokens(request.scope, len(read.prompt))
    return TokenCount(input_tokens=len(read.prompt))
