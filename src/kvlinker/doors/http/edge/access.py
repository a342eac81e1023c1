"""Access control: host names, API keys, the tenant that each key stands for, and whether it is an
admin's; for the app and routes.

Without configured keys every caller is the default tenant, and an admin (see
``kvlinker.doors.http.edge.address``). With keys, every route asks for ``Authorization: Bearer
<key>`` or ``x-api-key: <key>``. Exempt are probes, which have no keys (``/health``, ``/live``), the
pages and their files (without any data in them: ``/`` asks its reader for a key) and
``/openapi.json``. Any valid key reads ``/metrics`` and ``/status``, which hold sums over all
tenants and name none; the last requests are shown to their own tenant, and to admins.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvlinker.base.errors import AuthenticationError, KVLinkerError
from kvlinker.base.types.tenants import DEFAULT_TENANT, tenant_of_key
from kvlinker.doors.http.edge.address import is_loopback
from kvlinker.doors.http.edge.draining import PROBES
from kvlinker.doors.http.edge.errors import error_response
from kvlinker.doors.http.pages import PAGE_PATHS
from kvlinker.settings import Settings

_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[0-9A-Za-z._-]+))(?::[0-9]*)?")
"""Matches a ``Host`` as it must be written: an IPv6 address in brackets or a name, and perhaps a
port."""

KEY_HEADERS = ("x-api-key", "api-key")
"""The headers of a key beside ``Authorization``: Anthropic's and Azure's."""

CONTAINER_HOST = "host.docker.internal"
"""The name by which programs in containers call their own machine, and no site its own."""

OPEN_PATHS = PAGE_PATHS | PROBES | {"/openapi.json"}


@dataclass(frozen=True, slots=True)
class Caller:
    """Describes who sends a request: the ``tenant``, and whether it is an ``admin``, who may write
    shared caches."""

    tenant: str
    admin: bool


OPERATOR = Caller(DEFAULT_TENANT, admin=True)
"""The caller of all requests where there are no keys: a client that reaches a loopback address is
on the server's own machine."""


async def _caller(request: Request) -> Caller:
    """Return the caller that ``KeyCheck`` found."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


async def _tenant(request: Request) -> str:
    return (await _caller(request)).tenant


CallerParam = Annotated[Caller, Depends(_caller)]
TenantParam = Annotated[str, Depends(_tenant)]


class UnknownHostError(KVLinkerError):
    """Raised for a request to a host name that is not the server's."""

    status = 421
    type = "invalid_request_error"
    code = "unknown_host"


class HostCheck:
    """ASGI middleware: answers 421 to requests whose ``Host`` is neither loopback nor among
    ``names``.

    A page of any site may let its own name point to 127.0.0.1 (DNS rebinding); a browser then takes
    a server on the reader's machine for that site's, and hands the page its answers.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = frozenset(map(str.lower, names))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host")
            if host is not None and not self._is_known(host):  # browsers always send one
                error = UnknownHostError(
                    f"This server does not answer for the host {host[:100]!r}. Call it localhost,"
                    " or add the name to its setting allowed_hosts (KVLINKER_ALLOWED_HOSTS)."
                )
                return await error_response(error, scope)(scope, receive, send)
        return await self._app(scope, receive, send)

    def _is_known(self, host: str) -> bool:
        written = _HOST.fullmatch(host)
        name = (written["address"] or written["name"]).lower() if written else ""
        return name in self._names or name == CONTAINER_HOST or is_loopback(name)


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


class KeyCheck:
    """ASGI middleware: answers 401 before a body is read, and notes the caller in the request's
    state."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        """``api_keys`` are all that are accepted; ``admin_keys`` are those of them that are
        admins'."""
        self._app = app
        self._callers = {
            hashlib.sha256(key.encode()).digest(): Caller(tenant_of_key(key), key in admin_keys)
            for key in api_keys
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = self._caller(Headers(scope=scope))
            if caller is None and scope["path"] not in OPEN_PATHS:
                return await error_response(_UNKNOWN_KEY, scope)(scope, receive, send)
            scope.setdefault("state", {})["caller"] = caller
        return await self._app(scope, receive, send)

    def _caller(self, headers: Headers) -> Caller | None:
        """Return the caller by the first key that is known; None if none is. Compares with every
        key, in constant time."""
        if not self._callers:
            return OPERATOR
        found = None
        for key in reversed(keys_of(headers)):
            given = hashlib.sha256(key.encode("latin-1")).digest()
            for digest, caller in self._callers.items():
                if hmac.compare_digest(digest, given):
                    found = caller
        return found


_UNKNOWN_KEY = AuthenticationError(
    "Missing or unknown API key. Send 'Authorization: Bearer <key>' or 'x-api-key: <key>', which"
    " api_key of a client and --api-key of a command do."
)
