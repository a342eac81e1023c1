"""A client that leaves at any moment leaves no connection open between router and server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from anyio import CancelScope
from starlette.types import Message
from tests.waiting import PATIENCE

from kvlinker_fleet.backends import Backends, always
from kvlinker_fleet.proxy import Proxy
from kvlinker_fleet.router import Router

CHAT = "/v1/chat/completions"
SCOPE = {
    **{"type": "http", "http_version": "1.1", "method": "POST", "path": CHAT, "query_string": b""},
    **{"raw_path": CHAT.encode(), "headers": [], "scheme": "http", "server": ("here", 80)},
}


class Answer(httpx.AsyncByteStream):
    """A stream of one event, which closes as httpcore's do: against cancelled scopes only."""

    def __init__(self) -> None:
        self.closing, self.closed = asyncio.Event(), asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"data: [DONE]\n\n"

    async def aclose(self) -> None:
        self.closing.set()
        with CancelScope(shield=True):
            for _ in range(10):
                await asyncio.sleep(0)
        self.closed.set()


@pytest.mark.parametrize("moment", ["begin", "close"])
def test_what_is_being_closed_is_closed(moment: str) -> None:
    async def ask() -> None:
        answer, begun = Answer(), asyncio.Event()

        async def served(request: httpx.Request) -> httpx.Response:
            if request.method == "GET":
                return httpx.Response(200)
            return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, stream=answer)

        bodies = iter([{"type": "http.request", "body": b"{}"}])

        async def receive() -> Message:
            body = next(bodies, None)
            if body is None:
                await (begun if moment == "begin" else answer.closing).wait()
            return body or {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            begun.set()

        router = Router()
        async with httpx.AsyncClient(transport=httpx.MockTransport(served)) as client:
            backends = Backends(always(["http://one:1"]), router, client, None)
            await backends.start()
            try:
                scope = SCOPE | {"state": {"request_id": "r"}}
                await Proxy(router, backends, client)(scope, receive, send)
                assert answer.closed.is_set()
            finally:
                await backends.stop()

    asyncio.run(asyncio.wait_for(ask(), PATIENCE))
