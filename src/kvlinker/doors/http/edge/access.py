"""Access control: host names, API keys, the tenant of each key, and whether it is an admin's.

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
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import Scope

from kvlinker.base.errors import AuthenticationError
from kvlinker.base.types.tenants import DEFAULT_TENANT, tenant_of_key
from kvlinker.doors.http.edge.address import is_loopback
from kvlinker.doors.http.edge.draining import PROBES
from kvlinker.doors.http.edge.errors import UnknownHostError
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
