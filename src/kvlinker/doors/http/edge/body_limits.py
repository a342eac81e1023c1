"""Refuses bodies that are too large or come too slowly, in any server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlinker.base.types.limits import BYTES_PER_TOKEN, LEAST_PROMPT_BODY_BYTES, MAX_BODY_BYTES

LEAST_BYTES_PER_SECOND = 10_000
"""The rate below which a body is too slow, once its first seconds are over."""


def prompt_body_bytes(max_tokens: int) -> int:
    """Return the limit of bodies that hold nothing but a prompt, or several, for a window of
    ``max_tokens`` tokens."""
    return min(MAX_BODY_BYTES, max(LEAST_PROMPT_BODY_BYTES, BYTES_PER_TOKEN * max_tokens))


class BodyLimits:
    """ASGI middleware: answers 413 to bodies that are too large, and 408 to those that are not
    complete in time.

    ``sizes`` are in bytes by path; bodies of other paths have ``MAX_BODY_BYTES``. Nothing is read
    of a body that announces too much. A body has so many ``seconds``, and one more for every
    ``LEAST_BYTES_PER_SECOND`` bytes that have come.
    """

    def __init__(self, app: ASGIApp, sizes: Mapping[str, int], seconds: float) -> None:
        self._app = app
        self._sizes = sizes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        most = self._sizes.get(scope["path"], MAX_BODY_BYTES)
        announced = int(Headers(scope=scope).get("content-length", 0))
        began = asyncio.get_running_loop().time()
        received = 0
        complete = False

        async def limited() -> Message:
            nonlocal received, complete
            if announced > most:
                raise _too_large(most)
            if complete:
                return await receive()
            deadline = began + self._seconds + received / LEAST_BYTES_PER_SECOND
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise _closing(
                    HTTPStatus.REQUEST_TIMEOUT, f"{received} bytes came in time"
                ) from None
            received += len(message.get("body", b""))
            if received > most:
                raise _too_large(most)
            complete = not message.get("more_body", False)
            return message

        return await self._app(scope, limited, send)


def _too_large(most: int) -> HTTPException:
    return _closing(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"over {most:,} bytes")


def _closing(status: HTTPStatus, detail: str) -> HTTPException:
    """Return the error of a body that is not read to its end, after which the connection ends."""
    return HTTPException(status, detail, headers={"Connection": "close"})
