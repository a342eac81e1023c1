"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from kvlinker.prompt.segments import Prompt
from kvlinker.server.bodies.chat import ChatBody
from kvlinker.server.formats.chat import ChatFormat
from kvlinker.server.routes.answering import answer, errors_name
from kvlinker.server.service import ServiceParam, TenantParam

router = APIRouter(tags=["completions"])


@router.post("/v1/chat/completions")
async def create_chat_completion(
    body: ChatBody, request: Request, service: ServiceParam, tenant: TenantParam
) -> Response:
    """Answer a conversation; message content mixes text and context caches, in any order."""
    service.check_model(body.model)
    messages = body.plain_messages()
    answer_format = ChatFormat(service.llm.model_name, logprobs=bool(body.logprobs))

    def build() -> list[Prompt]:
        return [service.llm.chat_prompt(messages, tenant=tenant)]

    with errors_name("messages", messages):
        return await answer(service, request, body, build, body.sampling_params(), answer_format, tenant=tenant)
