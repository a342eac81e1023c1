"""A server that answers as a test says: OpenAI's API as far as traffic needs it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvlinker.doors.http.edge.address import bind, url_of
from kvlinker_lab.load.endpoint import Endpoint

Body = Mapping[str, Any]
Answer = Callable[[Body], Response]
Serve = Callable[[Answer], Endpoint]


def chunk(text: str = "", *, finish: str | None = None) -> str:
    """An event of a streamed chat completion."""
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def usage_event(completion_tokens: int, prompt_tokens: int = 10, **details: int) -> str:
    """The event with the usage."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return (
        "data:"
        f" {json.dumps({'choices': [], 'usage': usage | {'prompt_tokens_details': details}})}\n\n"
    )


def streamed(*events: str | float, **options: Any) -> Response:
    """A stream of events; a number waits for so many seconds."""

    async def parts() -> AsyncIterator[str]:
        for event in events:
            if isinstance(event, str):
                yield event
            else:
                await asyncio.sleep(event)

    return StreamingResponse(parts(), media_type="text/event-stream", **options)


def words(*texts: str | float, **details: int) -> Response:
    """A complete answer of these texts, with a wait where a number stands."""
    said = [chunk(text) if isinstance(text, str) else text for text in texts]
    tokens = sum(isinstance(text, str) for text in texts)
    return streamed(
        *said, chunk(finish="length"), usage_event(tokens, **details), "data: [DONE]\n\n"
    )


@contextmanager
def _running(answer: Answer) -> Iterator[str]:
    async def complete(request: Request) -> Response:
        return answer(await request.json())

    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": "scripted"}]})

    routes = [
        Route("/v1/chat/completions", complete, methods=["POST"]),
        Route("/v1/models", models),
    ]
    with closing(bind("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(
            uvicorn.Config(Starlette(routes=routes), log_config=None, lifespan="off")
        )
        thread = threading.Thread(
            target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True
        )
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield url_of(listening)
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server with this answer to every chat completion."""
    running = []

    def start(answer: Answer) -> Endpoint:
        context = _running(answer)
        running.append(context)
        return Endpoint.find(f"{context.__enter__()}/v1")

    yield start
    for context in running:
        context.__exit__(None, None, None)
