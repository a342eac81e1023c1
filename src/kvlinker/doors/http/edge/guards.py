"""The two middlewares of all routes, a server's and a router's: ``Reception`` names, reads and logs
every request, and ``Guard`` lets those through that may be answered. CORS is between them. Queries
of kvlinker's own routes are checked here, too, by a dependency of all routes.

``Guard`` asks two others. ``Drain`` ends a server that receives a signal to stop: it refuses new
requests, finishes those under way, and cuts off those that take longer than ``drain_timeout``;
streams register with it, so that each of them ends with an event of its API. ``Access`` checks host
names and API keys, and finds the tenant of each key, and whether it is an admin's.

Without configured keys every caller is the default tenant, and an admin (see
``kvlinker.doors.http.edge.address``). With keys, every route asks for ``Authorization: Bearer
<key>`` or ``x-api-key: <key>``. Exempt are probes, which have no keys (``/health``, ``/live``), the
pages and their files (without any data in them: ``/`` asks its reader for a key) and
``/openapi.json``. Any valid key reads ``/metrics`` and ``/status``, which hold sums over all
tenants and name none; the last requests are shown to their own tenant, and to admins.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote
from weakref import WeakSet

from fastapi import Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlinker.base.errors import (
    AuthenticationError,
    InvalidRequestError,
    KVLinkerError,
    did_you_mean,
)
from kvlinker.base.types.limits import MAX_BODY_BYTES
from kvlinker.base.types.tenants import DEFAULT_TENANT, tenant_of_key
from kvlinker.doors.http.edge import access_log
from kvlinker.doors.http.edge.address import is_loopback
from kvlinker.doors.http.edge.bodies import closing, content_encoding, expand_body, too_large
from kvlinker.doors.http.edge.errors import (
    ANTHROPIC_HEADER,
    ANTHROPIC_ID_HEADER,
    IGNORED_HEADER,
    REQUEST_ID_HEADER,
    UnknownHostError,
    add_error_handlers,
    error_response,
    unexpected_error_response,
)
from kvlinker.doors.http.pages import PAGE_PATHS
from kvlinker.engines.contract.contract import engine_closed
from kvlinker.settings import Settings

T = TypeVar("T")

PROBES = frozenset({"/health", "/live", "/ping"})
"""The routes that are answered to the very end."""

FIGURES = frozenset({"/metrics", "/status"})
"""The routes that are answered as long as requests are being finished."""

REFUSED_HEADER = "x-kvlinker-refused"
"""Marks refusals of requests that were not started: routers may send them to another server."""

LAST_SECONDS = 1.0
"""The seconds allowed for sending last events and refusals."""

_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[0-9A-Za-z._-]+))(?::[0-9]*)?")
"""Matches a ``Host`` as it must be written: an IPv6 address in brackets or a name, and perhaps a
port."""

KEY_HEADERS = ("x-api-key", "api-key")
"""The headers of a key beside ``Authorization``: Anthropic's and Azure's."""

CONTAINER_HOST = "host.docker.internal"
"""The name by which programs in containers call their own machine, and no site its own."""

OPEN_PATHS = PAGE_PATHS | PROBES | {"/openapi.json"}

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

LEAST_BYTES_PER_SECOND = 10_000
"""The rate below which a body is too slow, once its first seconds are over."""

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
"""Matches the ids that clients may give: a word of the log, and of headers."""

MOST_IGNORED_CHARACTERS = 2000
"""The longest value of the header ``IGNORED_HEADER``; what is beyond is cut off."""

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


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: its ``tenant``, and whether it is an ``admin``, which may write
    shared caches."""

    tenant: str
    admin: bool


OPERATOR = Caller(DEFAULT_TENANT, admin=True)
"""The caller of all requests where there are no keys: a client that reaches a loopback address is
on the server's own machine."""


def caller_of(scope: Scope) -> Caller:
    """Return the caller of a request, which ``Access`` found."""
    caller: Caller = scope["state"]["caller"]
    return caller


async def _caller(request: Request) -> Caller:
    return caller_of(request.scope)


async def _tenant(request: Request) -> str:
    return caller_of(request.scope).tenant


CallerParam = Annotated[Caller, Depends(_caller)]


TenantParam = Annotated[str, Depends(_tenant)]


def hosts_to_check(settings: Settings) -> tuple[str, ...] | None:
    """Return the names that requests may call the server by, in addition to loopback's; None for
    any.

    Only those that are set, where any are; otherwise the bound host on a server without keys that
    is on loopback: any other can be reached under names that it does not know, and asks for keys.
    """
    if settings.allowed_hosts:
        return None if "*" in settings.allowed_hosts else (*settings.allowed_hosts, settings.host)
    return None if settings.accepted_keys or not is_loopback(settings.host) else (settings.host,)


def keys_of(headers: Headers) -> list[str]:
    """Return the keys that a request brings. Clients that are given a key by one header may put a
    word such as ``none`` into another."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = (token if scheme.lower() == "bearer" else None, *map(headers.get, KEY_HEADERS))
    return [key.strip() for key in given if key is not None]


class Access:
    """Checks the host and the key of each request, before its body is read."""

    def __init__(self, settings: Settings) -> None:
        hosts = hosts_to_check(settings)
        self.checks_hosts = hosts is not None
        self.is_keyed = bool(settings.accepted_keys)
        self._hosts = frozenset(map(str.lower, hosts or ()))
        self._callers = {
            hashlib.sha256(key.encode()).digest(): Caller(
                tenant_of_key(key), key in settings.admin_keys
            )
            for key in settings.accepted_keys
        }

    def check(self, scope: Scope, headers: Headers) -> None:
        """Note the caller in the request's state, where routes find it. Raises AuthenticationError
        without a known key, and UnknownHostError.

        A page of any site may let its own name point to 127.0.0.1 (DNS rebinding). A browser then
        takes a server on the reader's machine for that site's, and hands the page its answers.
        """
        host = headers.get("host")  # browsers always send one
        if self.checks_hosts and host is not None and not self._is_known(host):
            raise UnknownHostError(
                f"This server does not answer for the host {host[:100]!r}. Call it localhost,"
                " or add the name to its setting allowed_hosts (KVLINKER_ALLOWED_HOSTS)."
            )
        caller = self._caller(headers) if self.is_keyed else OPERATOR
        if caller is None and scope["path"] not in OPEN_PATHS:
            raise AuthenticationError(
                "Missing or unknown API key. Send 'Authorization: Bearer <key>' or 'x-api-key:"
                " <key>', which api_key of a client and --api-key of a command do."
            )
        scope["state"]["caller"] = caller

    def _is_known(self, host: str) -> bool:
        written = _HOST.fullmatch(host)
        name = (written["address"] or written["name"]).lower() if written else ""
        return name in self._hosts or name == CONTAINER_HOST or is_loopback(name)

    def _caller(self, headers: Headers) -> Caller | None:
        """Return the caller by the first key that is known; None if none is. Compares with every
        key, in constant time."""
        found = None
        for key in reversed(keys_of(headers)):
            given = hashlib.sha256(key.encode("latin-1")).digest()
            for digest, caller in self._callers.items():
                if hmac.compare_digest(digest, given):
                    found = caller
        return found


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


def name_request(scope: Scope, send: Send) -> Send:
    """Give a request its id: the client's own if it names one by ``X-Request-Id``. Return the
    ``send`` that names it in the answer's headers, and in ``X-Ignored-Fields`` what was left out of
    the request."""
    given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
    state = scope.setdefault("state", {})
    state["request_id"] = request_id

    async def send_named(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID_HEADER] = request_id
            if ANTHROPIC_HEADER in Headers(scope=scope):
                headers[ANTHROPIC_ID_HEADER] = request_id
            if ignored := state.get("ignored"):
                headers[IGNORED_HEADER] = ", ".join(ignored)[:MOST_IGNORED_CHARACTERS].strip()
        await send(message)

    return send_named


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


def limit_body(receive: Receive, headers: Headers, *, most: int, seconds: float) -> Receive:
    """Return the source of a body that raises HTTPException for more than ``most`` bytes, and for a
    body that is not complete in time.

    A body that announces too much is not read at all. It has ``seconds``, and one second more for
    every ``LEAST_BYTES_PER_SECOND`` bytes that have arrived.
    """
    announced = int(headers.get("content-length", 0))
    began = asyncio.get_running_loop().time()
    received = 0
    complete = False

    async def receive_limited() -> Message:
        nonlocal received, complete
        if announced > most:
            raise too_large(most)
        if complete:
            return await receive()
        deadline = began + seconds + received / LEAST_BYTES_PER_SECOND
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise closing(HTTPStatus.REQUEST_TIMEOUT, f"{received} bytes came in time") from None
        received += len(message.get("body", b""))
        if received > most:
            raise too_large(most)
        complete = not message.get("more_body", False)
        return message

    return receive_limited


async def cancel_on_disconnect(work: Awaitable[T], receive: Receive) -> T:
    """Return the result of ``work``, for which no thread waits, while the client is there; the
    request's body must have been read. Cancels it as soon as the client is gone, and raises
    ClientDisconnect."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        either: set[asyncio.Future[Any]] = {working, leaving}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        leaving.cancel()
        working.cancel()


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client is gone; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


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
