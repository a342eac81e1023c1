"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from kvlinker.prompt.segments import Prompt
from kvlinker.server.bodies.completion import CompletionBody
from kvlinker.server.formats.completion import CompletionFormat
from kvlinker.server.routes.answering import answer, errors_name
from kvlinker.server.service import ServiceParam, TenantParam

router = APIRouter(tags=["completions"])


@router.post("/v1/completions")
async def create_completion(
    body: CompletionBody, request: Request, service: ServiceParam, tenant: TenantParam
) -> Response:
    """Continue a text, token ids, or parts of text and context caches; no chat template."""
    service.check_model(body.model)
    plain = body.plain_prompts()
    answer_format = CompletionFormat(service.llm.model_name, logprobs=body.logprobs is not None)

    def build() -> list[Prompt]:
        return [service.llm.completion_prompt(prompt, tenant=tenant) for prompt in plain]

    with errors_name("prompt", plain[0]):  # several prompts hold no context caches
        return await answer(service, request, body, build, body.sampling_params(), answer_format, tenant=tenant)
