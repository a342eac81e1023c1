"""POST /tokenize: token ids as a request would have them, for budgets and for debugging."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool

from kvlinker.prompt.segments import Prompt
from kvlinker.server.bodies.completion import single_prompt
from kvlinker.server.bodies.tokenize import TokenizeBody
from kvlinker.server.routes.answering import errors_name
from kvlinker.server.service import Service, ServiceParam, TenantParam

router = APIRouter(tags=["models"])


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, service: ServiceParam, tenant: TenantParam) -> dict[str, Any]:
    """Ids of a ``text`` as a chunk, of a ``prompt`` or of ``messages``."""
    service.check_model(body.model)
    tokens = await run_in_threadpool(_tokens, service, body, tenant)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": service.llm.max_model_len}


def _tokens(service: Service, body: TokenizeBody, tenant: str) -> list[int]:
    llm = service.llm
    if body.text is not None:
        return list(llm.builder.encoder.encode_data(body.text))
    if body.messages is not None:
        messages = [message.plain() for message in body.messages]
        with errors_name("messages", messages):
            return _ids(llm.chat_prompt(messages, tenant=tenant))
    prompt = single_prompt(body.prompt or "")
    with errors_name("prompt", prompt):
        return _ids(llm.completion_prompt(prompt, tenant=tenant))


def _ids(prompt: Prompt) -> list[int]:
    return [token for segment in prompt.segments for token in segment.tokens]
