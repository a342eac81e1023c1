"""The way of both completion routes from prompts to an answer, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from kvlinker.errors import ContextCacheNotFoundError, ContextLengthError
from kvlinker.prompt.segments import Prompt
from kvlinker.server.bodies.generation import GenerationBody
from kvlinker.server.formats.base import AnswerFormat
from kvlinker.server.formats.usage import usage_body
from kvlinker.server.generation import Generation, server_timing
from kvlinker.server.service import Service
from kvlinker.server.streaming import EventStream
from kvlinker.types.sampling import SamplingParams


async def answer(
    service: Service,
    request: Request,
    body: GenerationBody,
    build: Callable[[], Sequence[Prompt]],
    sampling: SamplingParams,
    answer_format: AnswerFormat,
    *,
    tenant: str,
) -> Response:
    """Generate and respond. A client that goes away has its choices cancelled.

    ``build`` makes the prompts; like all that takes long, it runs in a thread.
    """
    loop = asyncio.get_running_loop()

    def begin() -> Generation:
        return Generation(service.llm, build(), sampling, policy=body.policy, n=body.choices, tenant=tenant, loop=loop)

    generation = await run_in_threadpool(begin)
    if body.stream:
        return EventStream(generation, answer_format, include_usage=body.include_usage)
    async with generation.cancelled_on_disconnect(request.receive):
        outcomes = await generation.outcomes()
    finished = [outcome.finished for outcome in outcomes]
    usage = usage_body([end.usage for end in finished], generation.n)
    return JSONResponse(
        answer_format.answer(outcomes) | {"usage": usage},
        headers={"Server-Timing": server_timing([end.timing for end in finished])},
    )


@contextmanager
def errors_name(param: str, content: Any) -> Iterator[None]:
    """Errors about a prompt name the request's parameter, or the place of the context cache in it."""
    try:
        yield
    except ContextCacheNotFoundError as error:
        error.param = _find(error.cache_id, content, param) or param
        raise
    except ContextLengthError as error:
        if error.param != "max_tokens":
            error.param = param
        raise


def _find(cache_id: str, content: Any, path: str) -> str | None:
    """Path of the first part with this id, such as ``messages.0.content.1.id``."""
    if isinstance(content, dict):
        if content.get("type") == "context_cache" and content["id"] == cache_id:
            return f"{path}.id"
        return _find(cache_id, content.get("content"), f"{path}.content")
    if isinstance(content, list):
        found = (_find(cache_id, entry, f"{path}.{index}") for index, entry in enumerate(content))
        return next((place for place in found if place), None)
    return None
