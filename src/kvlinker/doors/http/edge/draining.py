"""The end of a server that receives a signal to stop: it refuses new requests, finishes those under
way, and cuts off those that take longer than ``drain_timeout``.

``EngineServer`` begins and awaits it at a signal, ``Guard`` stands before all routes,
``/health`` reports it, and streams register with it, so that each of them ends with an event of its
API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol
from weakref import WeakSet

from starlette.types import Receive

from kvlinker.base.errors import KVLinkerError
from kvlinker.engines.contract.limits import engine_closed

PROBES = frozenset({"/health", "/live", "/ping"})
"""The routes that are answered to the very end."""

FIGURES = frozenset({"/metrics", "/status"})
"""The routes that are answered as long as requests are being finished."""

REFUSED_HEADER = "x-kvlinker-refused"
"""Marks refusals of requests that were not started: routers may send them to another server."""

LAST_SECONDS = 1.0
"""The seconds allowed for sending last events and refusals."""


class OpenAnswer(Protocol):
    """An answer that is being generated."""

    def fail(self, error: KVLinkerError) -> None:
        """End with an error, in the format of the request's API. Called in the event loop."""


class DrainReport(NamedTuple):
    """Counts the requests that were running when a server was asked to stop."""

    finished: int
    cut: int


class Drain:
    """Counts the requests of one server, and ends them when it is asked to stop. All methods but
    ``begin`` belong to the server's event loop."""

    def __init__(self, timeout: float) -> None:
        """``timeout`` is the time in which requests may finish, in seconds."""
        self.timeout = timeout
        self.began = False
        """True from the signal on."""
        self.ended = False
        """True when all requests have been finished or cut off."""
        self.next_model: str | None = None
        """The model that is to be loaded in the place of this one; None where the server stops."""
        self._running: set[asyncio.Future[None]] = set()
        self._answers: WeakSet[OpenAnswer] = WeakSet()
        self._idle = asyncio.Event()
        self._finished = 0
        self._cuts = False

    @property
    def running(self) -> int:
        """The number of requests under way."""
        return len(self._running)

    def begin(self, next_model: str | None = None) -> None:
        """Refuse requests from now on; ``next_model`` comes in the place of this one. May be called
        by a signal's handler."""
        self.next_model = next_model
        self.began = True

    def add(self, answer: OpenAnswer) -> None:
        """Register an answer, which fails when its request is cut off."""
        self._answers.add(answer)
        if self._cuts:
            answer.fail(engine_closed())

    @contextmanager
    def request(self) -> Iterator[asyncio.Future[None]]:
        """Count a request as under way until the block ends; the yielded future is done when it is
        cut off."""
        cut = asyncio.get_running_loop().create_future()
        self._running.add(cut)
        try:
            yield cut
        finally:
            self._running.remove(cut)
            self._finished += self.began and not self._cuts
            if not self._running:
                self._idle.set()

    async def finish(self) -> DrainReport:
        """Wait until all requests are finished, and cut off those that are not after
        ``timeout``."""
        await self._wait_until_idle(self.timeout)
        left = list(self._running)
        self._cuts = True
        for cut in left:
            cut.set_result(None)
        for answer in list(self._answers):
            answer.fail(engine_closed())
        await self._wait_until_idle(LAST_SECONDS)
        self.ended = True
        return DrainReport(self._finished, len(left))

    async def _wait_until_idle(self, seconds: float) -> None:
        self._idle.clear()
        if self._running:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)


async def read_body(receive: Receive) -> None:
    """Read a body to its end, because a client that is still sending would miss the answer if the
    connection closed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_SECONDS):
            while (await receive()).get("more_body", False):
                pass
