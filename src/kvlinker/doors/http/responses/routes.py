"""POST /v1/responses."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from kvlinker.doors.http.answers.answering import completion_responses
from kvlinker.doors.http.answers.dialects import respond_in_dialect
from kvlinker.doors.http.edge.access import TenantParam
from kvlinker.doors.http.edge.bodies import BodyRoute
from kvlinker.doors.http.models import ServedModelParam
from kvlinker.doors.http.responses.answers import ResponseAnswer
from kvlinker.doors.http.responses.objects import ResponseObject, ResponseStreamEvent
from kvlinker.doors.http.responses.requests import ResponsesRequest

router = APIRouter(tags=["responses"], route_class=BodyRoute)


def _responses() -> dict[int | str, dict[str, Any]]:
    described = completion_responses(ResponseStreamEvent.__name__, ignores=True)
    described[200]["description"] = (
        "The answer; with `stream`, server-sent events that have the names of their types. A stream"
        " that fails half way ends with an event `response.failed`."
    )
    return described


@router.post("/v1/responses", response_model=ResponseObject, responses=_responses())
async def create_response(
    body: ResponsesRequest, request: Request, served: ServedModelParam, tenant: TenantParam
) -> Response:
    """Answer a conversation that is given as items, all of them; nothing is kept."""
    answer = ResponseAnswer(served.llm, body)
    return await respond_in_dialect(served, request, body.translated(), answer, tenant=tenant)
