"""The threads in which an app encodes the texts of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread
from fastapi import Request

T = TypeVar("T")

LONG_TEXT_BYTES = 256 * 2**10
"""The length of a body from which on its texts take noticeable time and memory to encode."""

LONG_AT_ONCE = 2
"""The most requests with long texts that are encoded at the same time."""


class EncodingThreads:
    """Runs functions that encode a request's texts: those of short texts in the threads that all
    routes share, those of long ones a few at a time in threads of their own."""

    def __init__(self) -> None:
        self._long = anyio.CapacityLimiter(LONG_AT_ONCE)

    async def run(self, request: Request, function: Callable[[], T]) -> T:
        """Return the result of ``function``, for a request whose body has been read."""
        if len(await request.body()) >= LONG_TEXT_BYTES:
            return await self.run_long(function)
        return await anyio.to_thread.run_sync(function)

    async def run_long(self, function: Callable[[], T]) -> T:
        """Return the result of ``function``, which takes long whatever the body's length."""
        return await anyio.to_thread.run_sync(function, limiter=self._long)
