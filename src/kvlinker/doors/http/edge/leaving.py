"""Clients that leave while something is computed for them: it ends, too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def while_there(work: Awaitable[T], receive: Receive) -> T:
    """Return the result of ``work``, for which no thread waits, while the client is there; the
    request's body must have been read. Cancels it as soon as the client is gone, and raises
    ClientDisconnect."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(left(receive))
    try:
        either: set[asyncio.Future[Any]] = {working, leaving}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        leaving.cancel()
        working.cancel()


async def left(receive: Receive) -> None:
    """Wait until the client is gone; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
