"""Handles the common parts of all routes: how requests are framed and addressed, HEAD requests, and
unknown query parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlinker.base.errors import InvalidRequestError, did_you_mean
from kvlinker.doors.http.edge.errors import error_response

VERSION = "/v1"
"""Stands before the paths of other APIs."""

_SHORT = re.compile(
    r"/(chat/completions|completions|messages|messages/count_tokens|embeddings"
    r"|(responses|models)(/.*)?)",
    re.DOTALL,
)
"""Matches their paths without it."""

TAKEN_QUERY = frozenset({"api-version"})
"""The query parameters of others that mean nothing on any route."""

OWN_PATHS = ("/v1/context_caches", "/v1/link", "/v1/usage", "/v1/audit")
"""Begin the paths of routes that only kvlinker has."""

_SCHEMES = (b"http://", b"https://")


class Framing:
    """ASGI middleware: reads targets in absolute form as RFC 9112 wants it (3.2.2), and refuses
    requests that say their body's length in two ways, which a proxy in front may read as two
    requests (6.1)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if "transfer-encoding" in headers and "content-length" in headers:
                error = InvalidRequestError(
                    "The request has both 'Transfer-Encoding' and 'Content-Length'. Send one of"
                    " them."
                )
                refusal = error_response(error, scope)
                refusal.headers["Connection"] = "close"
                return await refusal(scope, receive, send)
            if scope["raw_path"].lower().startswith(_SCHEMES):
                _read_absolute_target(scope)
        return await self._app(scope, receive, send)


def _read_absolute_target(scope: Scope) -> None:
    """Set the path, and the host that counts instead of the header's."""
    authority, slash, path = scope["raw_path"].partition(b"://")[2].partition(b"/")
    scope["raw_path"] = slash + path or b"/"
    scope["path"] = unquote(scope["raw_path"].decode("ascii"))
    MutableHeaders(scope=scope)["host"] = authority.decode("ascii")


class ShortPaths:
    """ASGI middleware: the routes of other APIs are answered without ``/v1``, too, as clients ask
    whose base address has none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(with_version(scope), receive, send)


def with_version(scope: Scope) -> Scope:
    """Return the scope of a request with ``/v1`` before its path, where that was left out."""
    if scope["type"] != "http" or not _SHORT.fullmatch(scope["path"]):
        return scope
    path = VERSION + scope["path"]
    return {**scope, "path": path, "raw_path": VERSION.encode() + scope["raw_path"]}


class HeadRequests:
    """ASGI middleware: HEAD is answered as GET is, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await self._app(scope, receive, send)

        async def bodiless(message: Message) -> None:
            await send(
                {**message, "body": b""} if message["type"] == "http.response.body" else message
            )

        read = {**scope, "method": "GET"}
        try:
            await self._app(read, receive, bodiless)
        finally:
            scope["route"] = read.get("route")


async def refuse_unknown_query(request: Request) -> None:
    """Check the query's parameters of kvlinker's own routes, where a misspelt one would list or
    delete something else, against those that the OpenAPI document has of the route, as a dependency
    of all routes. Raises InvalidRequestError for the first unknown one. Other routes take any."""
    own = request.url.path.startswith(OWN_PATHS)
    if not own or not request.query_params.keys() - TAKEN_QUERY:
        return
    operations = request.app.openapi()["paths"].get(request.scope["route"].path_format, {})
    documented = [
        parameter
        for parameter in operations.get(request.method.lower(), {}).get("parameters", ())
        if parameter["in"] == "query"
    ]
    for name in request.query_params.keys() - TAKEN_QUERY:
        if not any(_is_named(parameter, name) for parameter in documented):
            known = [parameter["name"] for parameter in documented]
            takes = f"This route takes {', '.join(known)}." if known else "This route takes none."
            raise InvalidRequestError(
                f"Unknown query parameter: {name!r}. {takes}{did_you_mean(name, known)}",
                param=name,
                code="unknown_parameter",
            )


def _is_named(parameter: Mapping[str, Any], name: str) -> bool:
    """Return whether a query's ``name`` is the parameter's, or means to be a pair of it, such as
    ``metadata[project]``."""
    known: str = parameter["name"]
    return name.startswith(known) if parameter.get("style") == "deepObject" else name == known
