"""Bodies of requests that are not plain: compressed ones are expanded, and long ones are looked at
before they are parsed.

Python's JSON parser holds the interpreter's lock until it is done, in any thread: so the values in
a body are counted first, piece by piece, and a body with far too many is refused without being
parsed.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from kvlinker.base.errors import InvalidRequestError
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

LONG_BODY_BYTES = 16 * 2**10
"""The length of a body from which on it is read in a thread."""

_PIECE_BYTES = 2**16

T = TypeVar("T")


def prompt_body_bytes(max_tokens: int) -> int:
    """Return the limit of bodies that hold only prompts, for a window of ``max_tokens`` tokens."""
    return min(MAX_BODY_BYTES, max(LEAST_PROMPT_BODY_BYTES, BYTES_PER_TOKEN * max_tokens))


def too_large(most: int) -> HTTPException:
    """Return the error of a body of more than ``most`` bytes."""
    return closing(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"over {most:,} bytes")


def closing(status: HTTPStatus, detail: str) -> HTTPException:
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
