"""Access control: API keys, the tenant that each key stands for, and whether it is an admin's; for the app and routes.

Without configured keys every caller is the default tenant, and an admin (see ``kvlinker.server.address``). With keys,
every route asks for ``Authorization: Bearer <key>``, but for ``/health`` (probes have no keys), ``/`` (a page without
any data in it: it asks its reader for a key) and ``/openapi.json``. Any valid key reads ``/metrics`` and ``/status``,
which hold sums over all tenants and name none.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvlinker.errors import AuthenticationError
from kvlinker.server.errors import error_response
from kvlinker.types.tenants import DEFAULT_TENANT, tenant_of_key

OPEN_PATHS = frozenset({"/", "/health", "/openapi.json"})


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: its ``tenant``, and whether it is an ``admin``, who may write shared context caches."""

    tenant: str
    admin: bool


OPERATOR = Caller(DEFAULT_TENANT, admin=True)
"""The caller of all requests where there are no keys: whoever reaches a loopback address is on the server's own
machine."""


async def _caller(request: Request) -> Caller:
    """Return the caller that ``KeyCheck`` found."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


async def _tenant(request: Request) -> str:
    return (await _caller(request)).tenant


CallerParam = Annotated[Caller, Depends(_caller)]
TenantParam = Annotated[str, Depends(_tenant)]


class KeyCheck:
    """ASGI middleware: answers 401 before a body is read, and notes the caller in the request's state."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        """``api_keys`` are all that are accepted; ``admin_keys`` are those of them that are admins'."""
        self._app = app
        self._callers = {
            hashlib.sha256(key.encode()).digest(): Caller(tenant_of_key(key), key in admin_keys) for key in api_keys
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = self._caller(Headers(scope=scope))
            if caller is None and scope["path"] not in OPEN_PATHS:
                return await error_response(_UNKNOWN_KEY, scope)(scope, receive, send)
            scope.setdefault("state", {})["caller"] = caller
        return await self._app(scope, receive, send)

    def _caller(self, headers: Headers) -> Caller | None:
        """Return the caller by the key; None for a missing or unknown one. Compares with every key, in constant
        time."""
        if not self._callers:
            return OPERATOR
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        given = hashlib.sha256(key.strip().encode("latin-1")).digest()
        found = None
        for digest, caller in self._callers.items():
            if hmac.compare_digest(digest, given):
                found = caller
        return found


_UNKNOWN_KEY = AuthenticationError("Missing or unknown API key. Send 'Authorization: Bearer <key>'.")
