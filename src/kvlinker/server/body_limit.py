"""Bodies have a limit: larger ones are answered with 413, whether they announce their length or not."""

from __future__ import annotations

from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 64 * 2**20


class BodyLimit:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"over {self._max_bytes} bytes")
            return message

        return await self._app(scope, limited, send)
