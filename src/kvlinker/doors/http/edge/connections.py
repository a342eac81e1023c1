"""Connections of clients that send or read slowly or not at all, which must not stay open or keep
memory for ever; uvicorn's settings; and the end of a server, drained at a signal, or closed when
the engine has failed.

Headers are timed by uvicorn's protocol, which alone sees them; bodies by ``limit_body``, which
works in any server.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvlinker.doors.http.edge.guards import LAST_SECONDS, Drain

SHUTDOWN_SECONDS = 10
"""The time that uvicorn gives to running requests when it stops without having drained."""

FAILED_SECONDS = 1.0
"""The time that a server whose engine has failed goes on with the connections that are open."""

LEAST_READ_BYTES_PER_SECOND = 10_000
"""The rate below which a client reads too slowly, once the system's buffer for it is full."""

POLL_SECONDS = 0.05
"""How often a server that ends looks whether all have their answers."""

logger = logging.getLogger(__name__)


def server_config(app: ASGIApp, *, request_timeout: float) -> uvicorn.Config:
    """Return uvicorn's settings to serve ``app``; ``request_timeout`` is the time for a request's
    headers in seconds.

    Logging is left as it is: the caller sets it up.
    """

    class Protocol(TimedProtocol):
        timeout = request_timeout

    return uvicorn.Config(
        app,
        loop="asyncio",  # whether uvloop is there or not: its transports buffer in another way
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )


class EngineServer(uvicorn.Server):
    """A server that drains at a signal to stop, or for another model to be loaded, and ends by
    itself when its engine has failed.

    SIGTERM and SIGINT are the same: the first begins to drain, the second ends the process at once.

    When the engine has failed, requests on open connections are answered for ``FAILED_SECONDS``
    more, each with the end of its connection, so that none is cut off without an answer. New
    connections are left to the next server on the socket.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        listener: socket.socket,
        *,
        healthy: Callable[[], bool],
        drain: Drain,
    ) -> None:
        """``listener`` is the socket that another server may take over, when the engine has failed;
        ``healthy`` returns whether the engine serves; ``drain`` is the application's."""
        super().__init__(config)
        self.engine_failed = False
        self._listener = listener
        self._healthy = healthy
        self._end = 0.0
        self._drain = drain
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain.began:
            _end_at_once(sig)
        self._drain.begin()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(
            sockets or [self._listener.dup()]
        )  # which is closed at the end, whether another takes over or not

    async def on_tick(self, counter: int) -> bool:
        if self._drain.began:
            if self._draining is None:
                self._draining = asyncio.create_task(self._end_well())
            if self._draining.done():
                self._draining.result()
                return True
            return await super().on_tick(counter)
        now = asyncio.get_running_loop().time()
        if not self.engine_failed and not self._healthy():
            self.engine_failed = True
            self._end = now + FAILED_SECONDS
            await stop_accepting(self)
            self.config.encoded_headers.append((b"connection", b"close"))
        return await super().on_tick(0 if self.engine_failed else counter) or (
            self.engine_failed and now >= self._end
        )

    async def _end_well(self) -> None:
        """Finish the requests, have the application finish its writes, and only then close the
        port."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._drain.timeout
        if self._drain.running:
            logger.info(
                "Told to stop. %d requests may finish within %g s; a second signal ends at once.",
                self._drain.running,
                self._drain.timeout,
            )
        drained = await self._drain.finish()
        level = logging.WARNING if drained.cut else logging.INFO
        logger.log(level, "Stopping: %d requests were finished, %d were cut off.", *drained)
        await self.lifespan.shutdown()
        await stop_accepting(self)
        if self._drain.next_model is None:
            self._listener.close()
        soon = clock() + LAST_SECONDS
        while (self._sending() and clock() < max(deadline, soon)) or (
            unanswered(self) and clock() < soon
        ):
            await asyncio.sleep(POLL_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def _sending(self) -> bool:
        """Return whether clients have not yet taken their answers."""
        return any(
            connection.transport.get_write_buffer_size()
            for connection in self.server_state.connections
        )


async def stop_accepting(server: uvicorn.Server) -> None:
    """Leave new connections to the next server on the socket; those that were accepted are open
    when this returns. (asyncio drops connections that it has accepted but not yet opened when its
    server is closed: the client's request would end without an answer.)"""
    loop = asyncio.get_running_loop()
    for listening in server.servers:
        for each in listening.sockets:
            loop.remove_reader(each.fileno())
    await asyncio.sleep(0)  # which opens them
    for listening in server.servers:
        listening.close()
    await asyncio.sleep(0)


def unanswered(server: uvicorn.Server) -> bool:
    """Return whether there are connections whose first request is on its way, or not answered to
    its end."""
    connections = [
        each for each in server.server_state.connections if isinstance(each, TimedProtocol)
    ]
    return any(each.cycle is None or not each.cycle.response_complete for each in connections)


def _end_at_once(number: int) -> None:
    """End this process by a signal, and those that it has started."""
    for process in multiprocessing.active_children():
        process.kill()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


class TimedProtocol(H11Protocol):
    """Closes connections on which a request's headers do not arrive in time, however many bytes of
    them do, and those whose body goes on when the answer has been sent.

    Cuts off clients that do not read data within ``timeout`` seconds, and one more for every
    ``LEAST_READ_BYTES_PER_SECOND`` bytes of it. At most one message of an answer waits for the
    system: the next one is taken when this one is sent. So the memory of a slow client is bounded,
    and no other client waits for it.
    """

    timeout: float
    _deadline: asyncio.TimerHandle | None = None
    _cut_off: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # pause whenever the system does not take all
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        unread = cast(asyncio.WriteTransport, self.transport).get_write_buffer_size()
        seconds = self.timeout + unread / LEAST_READ_BYTES_PER_SECOND
        self._cut_off = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timing()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timing()
        self._stop_watching()

    def _stop_timing(self) -> None:
        if self._cut_off is not None:
            self._cut_off.cancel()
            self._cut_off = None

    def _watch(self) -> None:
        """Begin to wait for the client where it owes the rest of a request, and end where it does
        not."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or self.transport.is_closing():
            self._stop_watching()
        elif self._deadline is None and self.timeout_keep_alive_task is None:
            self._deadline = self.loop.call_later(self.timeout, self._close)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        if not self.transport.is_closing():
            if self.conn.our_state is not h11.ERROR:
                self.conn.send(h11.ConnectionClosed())
            self.transport.close()
