"""Tenants own context caches; quotas say how much of them an owner may have."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvlinker.base.errors import InvalidRequestError

DEFAULT_TENANT = "default"
"""The tenant of every request, where there are no API keys."""

SHARED_TENANT = "shared"
"""The tenant that owns the context caches of scope "shared", which all may use. No API key gives
this name."""


class Scope(StrEnum):
    """The tenants that may use a context cache: its own (``PRIVATE``), or all of the server
    (``SHARED``)."""

    PRIVATE = "private"
    SHARED = "shared"

    def owner(self, tenant: str) -> str:
        """Return the tenant whose context caches ``tenant`` means by this scope."""
        return SHARED_TENANT if self is Scope.SHARED else tenant


def tenant_of_key(key: str) -> str:
    """Make the tenant's name of an API key: a hash, so that neither catalog nor logs hold the
    key."""
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of one tenant; None is no limit. Bytes are those of KV as computed, each chunk
    counted once."""

    bytes: int | None = None

    caches: int | None = None
    """The most context caches."""

    pinned_bytes: int | None = None
    """The most bytes that may be pinned."""


UNLIMITED = Quota()


@dataclass(frozen=True, slots=True)
class Quotas:
    """Holds the quotas of all tenants."""

    default: Quota = UNLIMITED
    """Applies to tenants that have no quota of their own, but not to the shared one."""

    own: Mapping[str, Quota] = field(default_factory=dict)
    """Quotas by tenant."""

    def of(self, tenant: str) -> Quota:
        """Return the tenant's quota."""
        return self.own.get(tenant, UNLIMITED if tenant == SHARED_TENANT else self.default)


NO_QUOTAS = Quotas()


def parse_scope(name: str) -> Scope:
    """Return the scope of this name. Raises InvalidRequestError for others."""
    try:
        return Scope(name)
    except ValueError as error:
        known = ", ".join(Scope)
        raise InvalidRequestError(
            f"Unknown scope {name!r}; known are {known}.", param="scope"
        ) from error
