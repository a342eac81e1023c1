"""Who may call: API keys, and the tenant that each key stands for.

Without configured keys every caller is the default tenant (see ``kvlinker.server.address``). With keys, every
route asks for ``Authorization: Bearer <key>``, but for ``/health`` (probes have no keys), ``/`` (a page without any
data in it: it asks its reader for a key) and ``/openapi.json``. Any valid key reads ``/metrics`` and ``/status``,
which hold sums over all tenants and name none.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from kvlinker.errors import AuthenticationError
from kvlinker.llm import DEFAULT_TENANT
from kvlinker.server.errors import error_response

OPEN_PATHS = frozenset({"/", "/health", "/openapi.json"})


def tenant_of_key(key: str) -> str:
    """The tenant's name: a hash, so that neither catalog nor logs hold the key."""
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:32]


def tenant_of(request: Request) -> str:
    """The tenant that ``KeyCheck`` found."""
    return str(request.scope["state"]["tenant"])


class KeyCheck:
    """ASGI middleware: answers 401 before a body is read, and notes the caller's tenant in the request's state."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._tenants = {hashlib.sha256(key.encode()).digest(): tenant_of_key(key) for key in api_keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            tenant = self._tenant(Headers(scope=scope))
            if tenant is None and scope["path"] not in OPEN_PATHS:
                return await error_response(_UNKNOWN_KEY)(scope, receive, send)
            scope.setdefault("state", {})["tenant"] = tenant
        return await self._app(scope, receive, send)

    def _tenant(self, headers: Headers) -> str | None:
        """None for a missing or unknown key. Compares with every key, in constant time."""
        if not self._tenants:
            return DEFAULT_TENANT
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        given = hashlib.sha256(key.strip().encode("latin-1")).digest()
        found = None
        for digest, tenant in self._tenants.items():
            if hmac.compare_digest(digest, given):
                found = tenant
        return found


_UNKNOWN_KEY = AuthenticationError("Missing or unknown API key. Send 'Authorization: Bearer <key>'.")
