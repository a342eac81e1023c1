"""Puts the middlewares of all routes around an application: a server's, and a router's."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from kvlinker.doors.http.edge.access import HostCheck, KeyCheck, hosts_to_check
from kvlinker.doors.http.edge.access_log import AccessLog
from kvlinker.doors.http.edge.bodies import BodyLimits
from kvlinker.doors.http.edge.draining import Drain, Draining
from kvlinker.doors.http.edge.encodings import Compression
from kvlinker.doors.http.edge.errors import (
    ANTHROPIC_ID_HEADER,
    IGNORED_HEADER,
    REQUEST_ID_HEADER,
    RequestIds,
    UnexpectedErrors,
    add_error_handlers,
)
from kvlinker.doors.http.edge.routing import Framing, HeadRequests, ShortPaths
from kvlinker.settings import Settings

BROWSER_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST")
"""The methods that pages of other origins may use, where they may call the server at all (CORS)."""

BROWSER_HEADERS = (
    REQUEST_ID_HEADER,
    ANTHROPIC_ID_HEADER,
    IGNORED_HEADER,
    "Retry-After",
    "Server-Timing",
)
"""The headers of answers that these pages may read."""


def add_guards(
    app: FastAPI, settings: Settings, drain: Drain, *, body_limits: Mapping[str, int]
) -> None:
    """Add the app's guards: they check hosts, keys, bodies and clients before any route, answer
    errors in the words of each API, log requests, and drain. ``body_limits`` are in bytes, by
    path."""
    app.state.keyed = bool(settings.accepted_keys)
    hosts = hosts_to_check(settings)
    app.state.hosts_checked = hosts is not None
    add_error_handlers(app)
    # from the innermost to the outermost
    app.add_middleware(Compression, sizes=body_limits)
    app.add_middleware(BodyLimits, sizes=body_limits, seconds=settings.request_timeout)
    app.add_middleware(HeadRequests)
    app.add_middleware(KeyCheck, api_keys=settings.accepted_keys, admin_keys=settings.admin_keys)
    if hosts is not None:
        app.add_middleware(HostCheck, names=hosts)
    app.add_middleware(UnexpectedErrors)
    app.add_middleware(Draining, drain=drain)
    if (
        settings.cors_origins
    ):  # keys go in headers, so there are no credentials of the browser's own to be allowed
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=BROWSER_METHODS,
            allow_headers=["*"],
            expose_headers=BROWSER_HEADERS,
        )
    app.add_middleware(Framing)
    app.add_middleware(AccessLog)
    app.add_middleware(ShortPaths)
    app.add_middleware(RequestIds)
