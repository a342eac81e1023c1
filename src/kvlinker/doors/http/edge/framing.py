"""Normalises or refuses requests with unusual framing or addresses, before any other middleware."""

from __future__ import annotations

from urllib.parse import unquote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from kvlinker.base.errors import InvalidRequestError
from kvlinker.doors.http.edge.errors import error_response

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
