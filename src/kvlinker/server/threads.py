"""The threads that encode texts, so that long texts wait for each other and hold up nobody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread
from fastapi import Request

T = TypeVar("T")

LONG_BODY_BYTES = 256 * 2**10
"""The length of a body from which on its texts take noticeable time and memory to encode."""

LONG_AT_ONCE = 2
"""The most requests with long bodies that are encoded at the same time."""


class EncodingThreads:
    """Runs what encodes a request's texts: short ones in the threads that all routes share, long ones a few at a time
    in threads of their own."""

    def __init__(self) -> None:
        self._long = anyio.CapacityLimiter(LONG_AT_ONCE)

    async def run(self, request: Request, function: Callable[[], T]) -> T:
        """Return what ``function`` returns, for a request whose body has been read."""
        is_long = len(await request.body()) >= LONG_BODY_BYTES
        return await anyio.to_thread.run_sync(function, limiter=self._long if is_long else None)
