"""Bodies of requests: those that are too large or come too slowly are refused, in any server,
compressed ones are expanded, and long ones are parsed outside the event loop, so that no other
request waits for them. Behind a body, a client that leaves.

Python's JSON parser holds the interpreter's lock until it is done, in any thread: so the values in
a body are counted first, piece by piece, and a body with far too many is refused without being
parsed.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from kvlinker.base.errors import InvalidRequestError, KVLinkerError
from kvlinker.base.types.limits import (
    BYTES_PER_TOKEN,
    LEAST_PROMPT_BODY_BYTES,
    MAX_BODY_BYTES,
    MOST_JSON_NODES,
    MOST_JSON_VALUES,
)
from kvlinker.doors.http.edge.errors import UnknownEncodingError

try:
    import zstandard
except ModuleNotFoundError:  # the extra ``zstd`` has it
    zstandard = None  # type: ignore[assignment]

_ZSTD_WINDOW_BYTES = 8 * 2**20
"""The most memory that a body in zstd may ask for (RFC 9659)."""

_ZSTD_SLICE_BYTES = 64
"""The bytes of zstd that are expanded at once: each 4 may become 128 KiB."""

LEAST_BYTES_PER_SECOND = 10_000
"""The rate below which a body is too slow, once its first seconds are over."""

LONG_BODY_BYTES = 16 * 2**10
"""The length of a body from which on it is read in a thread."""

_PIECE_BYTES = 2**16

T = TypeVar("T")

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def prompt_body_bytes(max_tokens: int) -> int:
    """Return the limit of bodies that hold only prompts, for a window of ``max_tokens`` tokens."""
    return min(MAX_BODY_BYTES, max(LEAST_PROMPT_BODY_BYTES, BYTES_PER_TOKEN * max_tokens))


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
            raise _closing(HTTPStatus.REQUEST_TIMEOUT, f"{received} bytes came in time") from None
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


def too_large(most: int) -> HTTPException:
    """Return the error of a body of more than ``most`` bytes."""
    return _closing(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"over {most:,} bytes")


def _closing(status: HTTPStatus, detail: str) -> HTTPException:
    """Return the error of a body that is not read to its end, after which the connection ends."""
    return HTTPException(status, detail, headers={"Connection": "close"})


def content_encoding(headers: MutableHeaders) -> str | None:
    """Return the encoding of a body that is compressed, and delete the headers that say so. Raises
    UnknownEncodingError."""
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in EXPANDERS:
        raise UnknownEncodingError(encoding, known=", ".join(EXPANDERS))
    del headers["content-encoding"], headers["content-length"]
    return encoding


def expand_body(receive: Receive, encoding: str, most: int) -> Receive:
    """Return the source of a compressed body that yields it expanded, as one message. It raises the
    errors of ``expand``."""
    complete = False

    async def receive_expanded() -> Message:
        nonlocal complete
        if complete:
            return await receive()
        pieces = []
        while not complete:
            message = await receive()
            if message["type"] != "http.request":
                return message
            pieces.append(message.get("body", b""))
            complete = not message.get("more_body", False)
        body = await run_in_threadpool(expand, encoding, b"".join(pieces), most)
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_expanded


def expand(encoding: str, body: bytes, most: int) -> bytes:
    """Return what a ``body`` in this encoding holds. Raises InvalidRequestError for one that is
    damaged, and HTTPException for one that holds more than ``most`` bytes."""
    try:
        expanded = EXPANDERS[encoding](body, most + 1) if body else b""
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InvalidRequestError(
            f"The body is not in the encoding {encoding!r} that its 'Content-Encoding' names, or is"
            f" damaged: {error}.",
            code="invalid_encoding",
        ) from error
    if len(expanded) > most:
        raise too_large(most)
    return expanded


def _gunzip(body: bytes, most: int) -> bytes:
    return gzip.GzipFile(fileobj=io.BytesIO(body)).read(most)


def _inflate(body: bytes, most: int) -> bytes:
    """Expand what is called ``deflate``: with zlib's frame, or without it, as some clients send."""
    framed = body[0] & 0x0F == zlib.DEFLATED and int.from_bytes(body[:2]) % 31 == 0
    inflater = zlib.decompressobj(zlib.MAX_WBITS if framed else -zlib.MAX_WBITS)
    expanded = inflater.decompress(body, most)
    if not inflater.eof and len(expanded) < most:
        raise EOFError("it ends too early")
    return expanded


def _expand_zstd(body: bytes, most: int) -> bytes:
    expander = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
    expanded = bytearray()
    try:
        for start in range(0, len(body), _ZSTD_SLICE_BYTES):
            expanded += expander.decompress(body[start : start + _ZSTD_SLICE_BYTES])
            if expander.eof or len(expanded) >= most:
                break
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if not expander.eof and len(expanded) < most:
        raise EOFError("it ends too early")
    return bytes(expanded)


EXPANDERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": _gunzip,
    "x-gzip": _gunzip,
    "deflate": _inflate,
    **({} if zstandard is None else {"zstd": _expand_zstd}),
}
"""Functions that expand a body to at most a number of bytes, by the names of encodings."""


class BodyRoute(APIRoute):
    """A route that parses and validates long bodies in a thread. All routes with a body are such.

    A body is validated by its own class: the framework would make another validator of it, without
    the rules of its configuration for JSON of any kind.
    """

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()
        field = self.body_field
        if field is None:
            return handle

        model = field.field_info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)

        async def read(request: Request) -> Response:
            body = await request.body()
            validated = _ValidatedRequest(request.scope, request.receive, body, model)
            try:
                return await handle(validated)
            except HTTPException as error:
                raise validated.failure or error from None

        return read


class _ValidatedRequest(Request):
    """A request whose body is there. Its ``json`` returns the validated body, which validates to
    itself at once.

    The framework takes any error of ``json`` for one of syntax: ``failure`` is the one that it was.
    """

    def __init__(self, scope: Scope, receive: Receive, body: bytes, model: type[BaseModel]) -> None:
        super().__init__(scope, receive)
        self.failure: Exception | None = None
        self._body = body
        self._model = model

    async def json(self) -> Any:
        try:
            if len(self._body) < LONG_BODY_BYTES:
                return self._validated()
            return await self.app.state.served.encoding.run(self, self._read)
        except (KVLinkerError, RequestValidationError) as error:
            self.failure = error
            raise

    def _read(self) -> Any:
        check_json(self._body)
        return self._validated()

    def _validated(self) -> Any:
        body = json.loads(self._body.decode("utf-8-sig"))
        try:
            return self._model.model_validate(body)
        except ValidationError as error:
            complaints = [
                {**complaint, "loc": ("body", *complaint["loc"])}
                for complaint in error.errors(include_url=False)
            ]
            raise RequestValidationError(complaints, body=body) from error


def check_json(body: bytes) -> None:
    """Count the values in a JSON text, without parsing it. Raises InvalidRequestError for too
    much."""
    values = nodes = 0
    within = False  # a string
    start = 0
    while start < len(body):
        piece = body[start : start + _PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and start + len(piece) < len(body):
            piece = piece[:-1]  # what is escaped is in the next piece
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[within::2])
        within ^= len(parts) % 2 == 0
        values += outside.count(b",")
        nodes += outside.count(b"{") + outside.count(b"[") + outside.count(b":")
    for count, most, what in (
        (values, MOST_JSON_VALUES, "values"),
        (nodes, MOST_JSON_NODES, "objects, lists and fields"),
    ):
        if count > most:
            raise InvalidRequestError(
                f"The body has {count:,} {what}; at most {most:,} are taken. Send less at once.",
                code="body_too_complex",
            )
