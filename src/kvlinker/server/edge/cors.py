"""Cross-origin requests: lets pages of chosen origins call the server from browsers (CORS)."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from kvlinker.server.edge.errors import REQUEST_ID_HEADER

_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST")
_READABLE = (REQUEST_ID_HEADER, "Retry-After", "Server-Timing")
"""Headers of answers that pages may read."""


def add_cors(app: FastAPI, origins: Sequence[str]) -> None:
    """Let pages of these origins, such as ``https://app.example``, call all routes; ``*`` stands for any.

    Keys go in headers, so there are no credentials of the browser's own to be allowed.
    """
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=_METHODS,
            allow_headers=["*"],
            expose_headers=_READABLE,
        )
