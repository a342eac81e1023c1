"""Passes requests on to the replica that the router chooses, and their answers back as they
arrive."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import httpx
from anyio import CancelScope
from fastapi.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from kvlinker.base.errors import EngineClosedError, InvalidRequestError, KVLinkerError
from kvlinker.base.types.tenants import DEFAULT_TENANT, tenant_of_key
from kvlinker.doors.http.edge.access_log import note_replica, note_route
from kvlinker.doors.http.edge.bodies import LONG_BODY_BYTES, check_json
from kvlinker.doors.http.edge.errors import (
    REQUEST_ID_HEADER,
    as_messages_error,
    error_body,
    error_response,
    request_id_of,
)
from kvlinker.doors.http.edge.guards import REFUSED_HEADER, keys_of, wait_for_disconnect
from kvlinker.doors.http.edge.request_spans import headers_of_trace, note_attributes
from kvlinker_fleet.backends import UNANSWERED, Backend, Backends
from kvlinker_fleet.naming import PromptOutline, outline_of, response_name
from kvlinker_fleet.router import Decision, Router

if TYPE_CHECKING:
    from kvlinker_fleet.kv_events import KVEvents

REPLICA_HEADER = "x-kvlinker-replica"

_OF_A_CONNECTION = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization"),
    *("te", "trailer", "transfer-encoding", "upgrade"),
}
"""Headers that are not passed on (RFC 9110, section 7.6.1)."""

# what is encoded could not be read for the reason of a refusal
_NOT_SENT = _OF_A_CONNECTION | {"host", "content-length", "accept-encoding"}
_NOT_ANSWERED = _OF_A_CONNECTION | {"date", "server"}

_KEY_HEADERS = ("authorization", "x-api-key")

MOST_TRIES = 3
"""The most servers that a request is sent to: one that ends them must not end all."""

_EMBEDDING = "/v1/embeddings"
_RESPONSES = "/v1/responses"

_RESPONSE_ID = re.compile(rb'"id":"(resp_[^"\\]+)"')
"""Matches the id of a response, with which an answer, and a stream's first event, begins."""

_GENERATING = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/messages", _RESPONSES, _EMBEDDING)
)
"""The routes whose requests may be sent again, since they leave nothing behind but caches."""

_CREATION = "/v1/context_caches"
_BUILDING = frozenset((_CREATION, "/v1/chunks/build"))
"""The routes whose requests go to builders. Work that a lost builder may have done is done again:
it was not reported, and the KV is the same."""

logger = logging.getLogger("kvlinker.fleet.proxy")


class ReplicaLostError(EngineClosedError):
    """The replica that answered ended in the middle of its answer."""

    code = "replica_lost"


class ReplicaSlowError(KVLinkerError):
    """The replica did not send anything for very long."""

    status = 504
    code = "replica_timeout"


class Proxy:
    """ASGI application: passes requests on. A replica that ends before the first byte of an answer
    is left for another; after it, a stream ends with an error event of its API."""

    def __init__(
        self,
        router: Router,
        backends: Backends,
        client: httpx.AsyncClient,
        events: KVEvents | None = None,
    ) -> None:
        """``events``: those of vLLM servers, where they are followed."""
        self._router = router
        self._events = events
        self._backends = backends
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["raw_path"].startswith(b"/"):  # else it could name another host
            error = InvalidRequestError("The request's target must be a path that begins with '/'.")
            await error_response(error, scope)(scope, receive, send)
            return
        if scope["path"] in _GENERATING | _BUILDING:  # other paths may have callers' texts
            note_route(scope, scope["path"])
        request = Request(scope, receive)
        body = await request.body()
        tenant = _tenant(request) if self._backends.keyed else DEFAULT_TENANT
        outline = partial(_outline, request, body, tenant, recognised=self._backends.recognises)
        prompt = outline() if len(body) < LONG_BODY_BYTES else await run_in_threadpool(outline)
        if self._events is not None:
            key = {name: request.headers[name] for name in _KEY_HEADERS if name in request.headers}
            ready = {each.url for each in self._backends.ready()}
            prompt = await self._events.outline(prompt, scope["path"], body, key, ready=ready)
        with _cancel_on_disconnect(receive):
            await self._route(request, body, tenant, prompt, send)

    async def _route(
        self, request: Request, body: bytes, tenant: str, prompt: PromptOutline, send: Send
    ) -> None:
        """Pass a request on to replicas, until one answers."""
        tried: Counter[str] = Counter()
        builds = request.method == "POST" and request.url.path in _BUILDING
        while tried.total() < MOST_TRIES:
            decision = self._choose(prompt, tried, builds=builds)
            if decision is None:
                break
            tried[decision.replica] += 1
            try:
                if await self._pass_on(decision, request, body, tenant, send):
                    return
            finally:
                self._router.note_end(decision)
        nobody = "all that were tried have ended" if tried else self._backends.missing()
        message = f"Nobody can answer: {nobody or 'no replica is ready'}. Try again in a moment."
        await _refuse(EngineClosedError(message), request, send)

    def _choose(
        self, prompt: PromptOutline, tried: Counter[str], *, builds: bool
    ) -> Decision | None:
        """Choose among the replicas that were not tried, or else were tried once: one that is ready
        may just have closed a connection that was idle for long. Requests that ``builds`` chunks go
        to builders, if there are any, and no other requests do."""
        now = time.monotonic()
        twice = {replica for replica, times in tried.items() if times > 1}
        builders = self._builders()
        others = self._backends.known.keys() - builders
        chosen: Decision | None = None
        for left_out in (others, builders) if builds else (builders,):
            for done in (tried.keys(), twice):
                chosen = chosen or self._router.choose(prompt, now, without=left_out | done)
        return chosen

    def _builders(self) -> set[str]:
        return {each.id for each in self._backends.known.values() if each.role == "build"}

    async def _pass_on(
        self, decision: Decision, request: Request, body: bytes, tenant: str, send: Send
    ) -> bool:
        """Pass a request on to a replica; returns False if another one may answer it."""
        began, builds = time.monotonic(), decision.replica in self._builders()
        backend = self._backends.known[decision.replica]
        own = {**headers_of_trace(), REQUEST_ID_HEADER.lower(): request_id_of(request.scope)}
        note_attributes(
            kvlinker_replica=decision.replica,
            kvlinker_chunks=decision.chunks,
            kvlinker_chunks_resident=decision.resident,
        )
        sent = self._client.build_request(
            request.method,
            backend.url + _target(request.scope),
            headers=[
                *_select_headers(request.headers.raw, _NOT_SENT | own.keys()),
                *((name.encode(), value.encode()) for name, value in own.items()),
            ],
            content=body or None,
        )
        try:
            with backend.unless_silent():
                answer = await self._client.send(sent, stream=True)
                pieces = answer.aiter_raw()
                if _is_stream(answer):
                    begun = await anext(pieces, b"")
                else:  # one that breaks off is as good as none
                    begun = b"".join([piece async for piece in pieces])
        except (httpx.ConnectError, httpx.ConnectTimeout):
            await self._backends.ask(decision.replica)
            return False
        except httpx.ReadTimeout:  # the same would take as long elsewhere
            await _refuse(ReplicaSlowError("The replica did not answer in time."), request, send)
            return True
        except (*UNANSWERED, TimeoutError):
            await self._backends.ask(decision.replica)
            if request.method != "GET" and request.url.path not in _GENERATING and not builds:
                error = ReplicaLostError("The replica ended before it answered. Try again.")
                await _refuse(error, request, send)
                return True
            return False
        if not _is_stream(answer) and _may_be_tried_elsewhere(answer, begun, request):
            await self._backends.ask(decision.replica)
            return False
        self._router.note_first_byte(decision, time.monotonic() - began)
        note_replica(request.scope, decision.reason)
        creates = request.method == "POST" and request.url.path == _CREATION and not builds
        if creates and not _is_stream(answer):
            ids = await run_in_threadpool(_ids, begun)
            self._router.note_made(decision.replica, ids, time.monotonic())
        if request.url.path == _RESPONSES and (named := _RESPONSE_ID.search(begun, 0, 500)):
            name = response_name(named[1].decode(), tenant)
            self._router.note_beginnings(decision.replica, [name], ())
        async with aclosing(answer):
            await _answer(backend, answer, begun, pieces, request.scope, send)
        return True


async def _answer(
    backend: Backend,
    answer: httpx.Response,
    begun: bytes,
    rest: AsyncIterator[bytes],
    scope: Scope,
    send: Send,
) -> None:
    """Pass on an answer of which ``begun`` was read, and the ``rest`` as it comes, and an error
    event where the replica of a stream is lost half way."""
    headers = [
        *_select_headers(answer.headers.raw, _NOT_ANSWERED),
        (REPLICA_HEADER.encode(), backend.id.encode()),
    ]
    start: Message = {
        "type": "http.response.start",
        "status": answer.status_code,
        "headers": headers,
    }
    await send(start)
    last = b""
    try:
        with backend.unless_silent():
            while begun:
                await send({"type": "http.response.body", "body": begun, "more_body": True})
                begun = await anext(rest, b"")
    except (*UNANSWERED, TimeoutError):
        logger.warning("A replica was lost in the middle of a stream.")
        last = _last_event(scope)
    await send({"type": "http.response.body", "body": last})


def _select_headers(
    headers: Iterable[tuple[bytes, bytes]], left_out: Collection[str]
) -> list[tuple[bytes, bytes]]:
    """Return the headers whose names are not in ``left_out``, with names in lower case."""
    return [
        (name.lower(), value)
        for name, value in headers
        if name.lower().decode("latin-1") not in left_out
    ]


def _last_event(scope: Scope) -> bytes:
    """Return the end of a stream whose replica was lost, in the words of its API."""
    error = ReplicaLostError("The replica ended in the middle of the answer. Ask again.")
    body = error_body(error, scope)
    path = scope["path"]
    if path == "/v1/messages":
        event_data = as_messages_error(body, error.status, scope).model_dump_json()
        return f"\n\nevent: error\ndata: {event_data}\n\n".encode()
    if path == "/v1/responses":
        event_data = json.dumps(body.error.model_dump() | {"type": "error", "sequence_number": 0})
        return f"\n\nevent: error\ndata: {event_data}\n\n".encode()
    return f"\n\ndata: {body.model_dump_json()}\n\ndata: [DONE]\n\n".encode()


def _ids(created: bytes) -> list[str]:
    """Return the ids of the context caches in an answer; none for an error."""
    with suppress(ValueError, KeyError, TypeError):
        return [str(each["id"]) for each in json.loads(created)["data"]]
    return []


def _is_stream(answer: httpx.Response) -> bool:
    kind: str = answer.headers.get("content-type", "")
    return kind.startswith("text/event-stream")


def _may_be_tried_elsewhere(answer: httpx.Response, body: bytes, request: Request) -> bool:
    """Return whether a server refuses what another one may take: it ends, and has not begun with
    it, or with nothing that could not be begun twice."""
    if answer.status_code != EngineClosedError.status:
        return False
    if REFUSED_HEADER in answer.headers:
        return True
    ends = b"catalog_unavailable" not in body
    return ends and request.url.path in _GENERATING


async def _refuse(error: KVLinkerError, request: Request, send: Send) -> None:
    await error_response(error, request.scope)(request.scope, request.receive, send)


@contextmanager
def _cancel_on_disconnect(receive: Receive) -> Iterator[None]:
    """Run a block until its end, or until the client leaves: its request ends there as here. Only a
    scope is cancelled, since httpx keeps connections open for ever whose task is, while it closes
    them."""

    def leave(leaving: asyncio.Future[None]) -> None:
        if not leaving.cancelled():
            leaving.exception()
            scope.cancel()

    with CancelScope() as scope:
        leaving = asyncio.ensure_future(wait_for_disconnect(receive))
        leaving.add_done_callback(leave)
        try:
            yield
        finally:
            leaving.cancel()


def _outline(request: Request, body: bytes, tenant: str, *, recognised: bool) -> PromptOutline:
    """Return the names in a request; nothing if it is no prompt, or where its body is no JSON,
    which its replica says."""
    if request.url.path == _EMBEDDING or request.method != "POST" or not body.startswith(b"{"):
        return PromptOutline()
    try:
        check_json(body)
        return outline_of(json.loads(body), tenant, recognised=recognised)
    except (InvalidRequestError, ValueError, RecursionError):
        return PromptOutline()


def _tenant(request: Request) -> str:
    """Return the tenant of a request's key, as replicas name it."""
    key = next(iter(keys_of(request.headers)), None)
    return tenant_of_key(key) if key else DEFAULT_TENANT


def _target(scope: Scope) -> str:
    query = scope["query_string"].decode("latin-1")
    path: str = scope["raw_path"].decode("latin-1")
    return f"{path}?{query}" if query else path
