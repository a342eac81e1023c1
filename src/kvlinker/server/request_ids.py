"""A name for every request, in the ``X-Request-Id`` header of its answer and in the log of what went wrong."""

from __future__ import annotations

import secrets

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"


def request_id_of(scope: Scope) -> str:
    """The id that ``RequestIds`` gave the request."""
    request_id: str = scope["state"]["request_id"]
    return request_id


class RequestIds:
    """ASGI middleware around all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request_id = f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def naming(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        return await self._app(scope, receive, naming)
