"""Bodies of requests that are compressed, as their ``Content-Encoding`` says: routes see what they
hold, whose bytes count."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Mapping

from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlinker.base.errors import InvalidRequestError, KVLinkerError
from kvlinker.base.types.limits import MAX_BODY_BYTES
from kvlinker.doors.http.edge.bodies import too_large
from kvlinker.doors.http.edge.errors import error_response

try:
    import zstandard
except ModuleNotFoundError:  # the extra ``zstd`` has it
    zstandard = None  # type: ignore[assignment]

_ZSTD_WINDOW_BYTES = 8 * 2**20
"""The most memory that a body in zstd may ask for (RFC 9659)."""

_ZSTD_SLICE_BYTES = 64
"""The bytes of zstd that are expanded at once: each 4 may become 128 KiB."""


class UnknownEncodingError(KVLinkerError):
    """Raised for a body in an encoding that the server cannot read."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_encoding"


class Compression:
    """ASGI middleware: expands compressed bodies. It answers 415 to encodings that it does not
    know; a damaged body is a 400, and one that holds more than its path's size a 413."""

    def __init__(self, app: ASGIApp, sizes: Mapping[str, int]) -> None:
        """``sizes`` are in bytes by path; bodies of other paths have ``MAX_BODY_BYTES``."""
        self._app = app
        self._sizes = sizes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = MutableHeaders(scope=scope)
        encoding = headers.get("content-encoding", "").strip().lower()
        if encoding in ("", "identity"):
            return await self._app(scope, receive, send)
        if encoding not in EXPANDERS:
            known = ", ".join(EXPANDERS)
            refusal = error_response(
                UnknownEncodingError(
                    f"The body's 'Content-Encoding' is {encoding[:100]!r}, but can be one of"
                    f" {known}. Leave the header out, and send the body as it is."
                ),
                scope,
            )
            refusal.headers["Accept-Encoding"] = known
            refusal.headers["Connection"] = "close"
            return await refusal(scope, receive, send)
        del headers["content-encoding"], headers["content-length"]
        most = self._sizes.get(scope["path"], MAX_BODY_BYTES)
        complete = False

        async def expanded() -> Message:
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

        return await self._app(scope, expanded, send)


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
