"""Serves an application over HTTP in a separate thread of a process that Ray runs."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from http import HTTPStatus
from threading import Thread

from fastapi import FastAPI

from kvlinker.doors.http.edge import access_log
from kvlinker.doors.http.edge.address import url_of
from kvlinker.doors.http.edge.connections import EngineServer, server_config
from kvlinker.doors.http.edge.guards import Drain
from kvlinker.settings import Settings

LAST_SECONDS = 15.0
"""The seconds that a server may take to end beyond its ``drain_timeout``."""


class BackgroundServer:
    """A server that runs until it is stopped, or until its application has failed."""

    def __init__(
        self,
        app: FastAPI,
        settings: Settings,
        listener: socket.socket,
        *,
        healthy: Callable[[], bool],
        drain: Drain,
    ) -> None:
        self.url = url_of(listener)
        self._drain = drain
        listener.listen()
        config = server_config(app, request_timeout=settings.request_timeout)
        self._server = EngineServer(config, listener, healthy=healthy, drain=drain)
        self._thread = Thread(target=self._server.run, name="http", daemon=True)
        self._thread.start()

    @property
    def serves(self) -> bool:
        """True until it is stopped or has failed."""
        return self._thread.is_alive() and not self._server.engine_failed

    def stop(self) -> None:
        """Finish the requests under way, and end."""
        self._drain.begin()
        self._thread.join(self._drain.timeout + LAST_SECONDS)


POLLED = {"/health", "/v1/residency"}
"""The routes that ingresses ask all the time."""


class _WithoutPolls(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        request = getattr(record, "request", {})
        return request.get("route") not in POLLED or request["status"] != HTTPStatus.OK


def log_as(settings: Settings, pipe: str | None) -> ExitStack:
    """Write this process's log, into a pipe if there is one, until the returned stack is closed.
    The frequent polls of ingresses are left out."""
    if pipe is not None:
        sys.stderr = open(pipe, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
        os.dup2(sys.stderr.fileno(), 2)  # for what is not written by Python
    logging.getLogger(access_log.__name__).addFilter(_WithoutPolls())
    stack = ExitStack()
    stack.enter_context(access_log.logging_to_stderr(settings.log_level, settings.log_format))
    return stack
