"""Answers requests while a server loads its model: probes learn that it lives and is not ready, and
all others when to come again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvlinker.base.errors import ModelLoadingError
from kvlinker.base.loading import Loading
from kvlinker.doors.http.edge.connections import (
    POLL_SECONDS,
    server_config,
    stop_accepting,
    unanswered,
)
from kvlinker.doors.http.edge.errors import error_response
from kvlinker.doors.http.edge.guards import (
    LAST_SECONDS,
    PROBES,
    REFUSED_HEADER,
    name_request,
    read_body,
)

USUAL_SECONDS, MOST_SECONDS = 5, 10
"""The seconds after which clients come again while nothing is known of the rest, and at the latest:
what is left is a rough guess at the beginning. Chosen by hand."""

JOIN_SECONDS = 5.0
"""The longest wait for the last of these answers, before the server itself begins."""


@contextmanager
def answering_while_loading(
    listener: socket.socket, loading: Loading, *, request_timeout: float
) -> Iterator[None]:
    """Answer requests on a socket that listens, in a thread of its own, while the block loads the
    model. Requests that come at the block's end wait for the server that is next on the socket."""
    config = server_config(loading_app(loading), request_timeout=request_timeout)
    config.lifespan = "off"
    server = _LoadingServer(config)
    thread = Thread(
        target=server.run, args=([listener.dup()],), name="kvlinker-loading", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(JOIN_SECONDS)


class _LoadingServer(uvicorn.Server):
    """A server that answers whatever it has accepted before it ends."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await stop_accepting(self)
        clock = asyncio.get_running_loop().time
        end = clock() + LAST_SECONDS  # for connections on which nothing comes
        while unanswered(self) and clock() < end:
            await asyncio.sleep(POLL_SECONDS)
        await super().shutdown(sockets)


def loading_app(loading: Loading) -> ASGIApp:
    """Make the application of a server whose model is being loaded."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        send = name_request(scope, send)
        await read_body(receive)
        seconds = min(loading.seconds_left or USUAL_SECONDS, MOST_SECONDS)
        if scope["path"] == "/live":
            response = JSONResponse({"status": "alive"})
        elif scope["path"] in PROBES:
            response = JSONResponse({"status": "loading"}, 503, {"Retry-After": str(seconds)})
        else:
            error = ModelLoadingError(f"{loading}. Try again then.", retry_after=seconds)
            response = error_response(error, scope)
            response.headers[REFUSED_HEADER] = "before it began"
        response.headers["Connection"] = "close"
        await response(scope, receive, send)

    return answer
