"""The two middlewares of all routes, a server's and a router's: ``Reception`` names, reads and logs
every request, and ``Guard`` lets those through that may be answered. CORS is between them. Queries
of kvlinker's own routes are checked here, too, by a dependency of all routes."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlinker.base.errors import InvalidRequestError, KVLinkerError, did_you_mean
from kvlinker.base.types.limits import MAX_BODY_BYTES
from kvlinker.doors.http.edge import access_log
from kvlinker.doors.http.edge.access import Access
from kvlinker.doors.http.edge.bodies import content_encoding, expand_body, limit_body
from kvlinker.doors.http.edge.draining import FIGURES, PROBES, REFUSED_HEADER, Drain, read_body
from kvlinker.doors.http.edge.errors import (
    ANTHROPIC_ID_HEADER,
    IGNORED_HEADER,
    REQUEST_ID_HEADER,
    add_error_handlers,
    error_response,
    name_request,
    unexpected_error_response,
)
from kvlinker.engines.contract.limits import engine_closed
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

VERSION = "/v1"
"""Stands before the paths of other APIs."""

_SHORT = re.compile(
    r"/(chat/completions|completions|messages|messages/count_tokens|embeddings"
    r"|(responses|models)(/.*)?)",
    re.DOTALL,
)
"""Matches the paths of other APIs without ``VERSION``."""

_SCHEMES = (b"http://", b"https://")

TAKEN_QUERY = frozenset({"api-version"})
"""The query parameters of others that mean nothing on any route."""

OWN_PATHS = ("/v1/context_caches", "/v1/link", "/v1/usage", "/v1/audit")
"""Begin the paths of routes that only kvlinker has."""


def add_guards(
    app: FastAPI, settings: Settings, drain: Drain, *, body_limits: Mapping[str, int]
) -> None:
    """Add both middlewares, and the app's answers to errors. ``body_limits`` are in bytes, by
    path."""
    access = Access(settings)
    app.state.keyed = access.is_keyed
    app.state.hosts_checked = access.checks_hosts
    add_error_handlers(app)
    app.add_middleware(
        Guard, access=access, drain=drain, sizes=body_limits, seconds=settings.request_timeout
    )
    if settings.cors_origins:
        # keys go in headers, so that no credentials of the browser's own are to be allowed
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=BROWSER_METHODS,
            allow_headers=["*"],
            expose_headers=BROWSER_HEADERS,
        )
    app.add_middleware(Reception)


class Reception:
    """ASGI middleware around all others: names a request, reads its target, and logs it.

    The routes of other APIs are answered without ``/v1``, too, for clients whose base address has
    none. Targets in absolute form are read as RFC 9112 wants it (3.2.2). Requests that say their
    body's length in two ways are refused, because a proxy in front may read two requests (6.1).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began = time.perf_counter()
        send = name_request(scope, send)
        scope = with_version(scope)
        headers = Headers(scope=scope)
        app = self._app
        if "transfer-encoding" in headers and "content-length" in headers:
            app = _refuse_two_lengths
        elif scope["raw_path"].lower().startswith(_SCHEMES):
            _read_absolute_target(scope)
        if not access_log.logger.isEnabledFor(logging.INFO):
            return await app(scope, receive, send)
        status: int | None = None
        sent = left = False

        async def watching() -> Message:
            nonlocal left
            message = await receive()
            left = left or (message["type"] == "http.disconnect" and not sent)
            return message

        async def noting(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                sent = not message.get("more_body", False)
            await send(message)

        try:
            await app(scope, watching, noting)
        finally:
            seconds = time.perf_counter() - began
            access_log.log_request(scope, access_log.LEFT if left else status, seconds)


def with_version(scope: Scope) -> Scope:
    """Return the scope of a request with ``/v1`` before its path, where that was left out."""
    if scope["type"] != "http" or not _SHORT.fullmatch(scope["path"]):
        return scope
    path = VERSION + scope["path"]
    return {**scope, "path": path, "raw_path": VERSION.encode() + scope["raw_path"]}


def _read_absolute_target(scope: Scope) -> None:
    """Set the path, and the host that counts instead of the header's."""
    authority, slash, path = scope["raw_path"].partition(b"://")[2].partition(b"/")
    scope["raw_path"] = slash + path or b"/"
    scope["path"] = unquote(scope["raw_path"].decode("latin-1"))
    MutableHeaders(scope=scope)["host"] = authority.decode("latin-1")


async def _refuse_two_lengths(scope: Scope, receive: Receive, send: Send) -> None:
    error = InvalidRequestError(
        "The request has both 'Transfer-Encoding' and 'Content-Length'. Send one of them."
    )
    refusal = error_response(error, scope)
    refusal.headers["Connection"] = "close"
    await refusal(scope, receive, send)


class Guard:
    """ASGI middleware: lets requests through that may be answered, and answers the errors of all.

    While the server drains, new requests are answered 503, and so are those that are cut off before
    their answer has begun; every answer that begins from then on is the last of its connection.
    Host and key are checked before a body is read (421, 401). Bodies are limited in size and time
    (413, 408), and expanded (415). HEAD is answered as GET is, without the body. A bug becomes a
    500 that says nothing of the inside, with the traceback in the log: the framework's own handler
    would raise the error again, and the connection would be closed under the client.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access,
        drain: Drain,
        sizes: Mapping[str, int],
        seconds: float,
    ) -> None:
        """``sizes`` are the most bytes of bodies by path; others have ``MAX_BODY_BYTES``. A body
        has ``seconds`` to arrive, and more for each piece of it."""
        self._app = app
        self._access = access
        self._drain = drain
        self._sizes = sizes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        drain, path = self._drain, scope["path"]

        async def closing(message: Message) -> None:
            if drain.began and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        if path in PROBES or (path in FIGURES and not drain.ended):
            return await self._answer(scope, receive, closing)
        if drain.began:
            await read_body(receive)
            refusal = error_response(engine_closed(), scope)
            refusal.headers[REFUSED_HEADER] = "before it began"
            return await refusal(scope, receive, closing)
        begun = refused = False

        async def noting(message: Message) -> None:
            nonlocal begun
            if not refused:
                begun = True
                await closing(message)

        with drain.request() as cut:
            # a task of its own: what the application waits for may end later than the request does
            answering = asyncio.ensure_future(self._answer(scope, receive, noting))
            try:
                await asyncio.wait({answering, cut}, return_when=asyncio.FIRST_COMPLETED)
                if begun or answering.done():
                    return await answering
                refused = True
                await error_response(engine_closed(), scope)(scope, receive, closing)
            finally:
                answering.cancel()
                answering.add_done_callback(_retrieve_error)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer a request that is checked, with a body that is limited."""
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            if is_head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        asked = scope
        is_head = scope["method"] == "HEAD"
        try:
            headers = MutableHeaders(scope=scope)
            self._access.check(scope, headers)
            most = self._sizes.get(scope["path"], MAX_BODY_BYTES)
            receive = limit_body(receive, headers, most=most, seconds=self._seconds)
            if "content-encoding" in headers and (encoding := content_encoding(headers)):
                receive = expand_body(receive, encoding, most)
            if is_head:
                asked = {**scope, "method": "GET"}
            await self._app(asked, receive, noting)
        except ClientDisconnect:
            return  # nobody waits for an answer
        except KVLinkerError as error:
            if started:
                raise
            await error_response(error, scope)(scope, receive, noting)
        except Exception:
            if started:
                raise
            await unexpected_error_response(scope)(scope, receive, noting)
        finally:
            if is_head:
                scope["route"] = asked.get("route")


def _retrieve_error(task: asyncio.Future[None]) -> None:
    """Retrieve the exception of a task that nobody awaits, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


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
