"""Connections of clients that read their answers slowly or not at all, which must not keep memory
for ever.

``server.edge.connections``, the only caller, does the same for clients that send slowly.
"""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol

LEAST_READ_BYTES_PER_SECOND = 10_000
"""The rate below which a client reads too slowly, once the system's buffer for it is full."""


class ReadTimedProtocol(H11Protocol):
    """Cuts off clients that do not read data within ``timeout`` seconds, and one more for every
    ``LEAST_READ_BYTES_PER_SECOND`` bytes of it.

    At most one message of an answer waits for the system: the next one is taken when this one is
    sent. So the memory of a slow client is bounded, and no other client waits for it.
    """

    timeout: float
    _cut_off: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # pause whenever the system does not take all

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

    def _stop_timing(self) -> None:
        if self._cut_off is not None:
            self._cut_off.cancel()
            self._cut_off = None
