"""Sends again what a server refuses that is being restarted, as clients of an orchestrated service
do."""

from __future__ import annotations

from asyncio import sleep
from collections.abc import Awaitable, Callable

import httpx

from kvlinker.base.errors import EngineClosedError, ModelLoadingError
from kvlinker.doors.client import ServerUnreachableError

CONNECT_SECONDS = 0.5
"""The time after which a client tries to connect again."""


class RetryingTransport(httpx.AsyncBaseTransport):
    """Sends each request over a connection of its own, until it is not refused: again after what
    ``Retry-After`` says, or soon where nobody listens. A request that was accepted is never sent
    again."""

    def __init__(self) -> None:
        self.refused = 0
        """The number of refusals so far."""
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._inner = httpx.AsyncHTTPTransport(limits=unlimited)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        while True:
            try:
                response = await self._inner.handle_async_request(request)
            except httpx.ConnectError:
                pause = CONNECT_SECONDS
            else:
                if (
                    response.status_code != EngineClosedError.status
                    or "retry-after" not in response.headers
                ):
                    return response
                await response.aclose()
                pause = float(response.headers["retry-after"])
            self.refused += 1
            await sleep(pause)

    async def aclose(self) -> None:
        await self._inner.aclose()


async def retry(act: Callable[[], Awaitable[None]]) -> int:
    """Do something with an ``AsyncClient`` until it is not refused, and return the number of
    refusals; once more where the server has just closed the idle connection, as it may at any
    time."""
    refused = broken = 0
    while True:
        try:
            await act()
            return refused
        except (EngineClosedError, ModelLoadingError) as error:
            pause = float(error.retry_after)
        except ServerUnreachableError as error:
            if isinstance(error.__cause__, httpx.ConnectError):
                pause = CONNECT_SECONDS
            elif broken:
                raise
            else:
                broken += 1
                continue
        refused += 1
        await sleep(pause)
