"""Who owns context caches, and how much of them an owner may have."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvlinker.errors import InvalidRequestError

DEFAULT_TENANT = "default"
"""Everybody, where there are no API keys."""

SHARED_TENANT = "shared"
"""Owns the context caches of scope "shared", which all tenants may use. No API key gives this name."""


class Scope(StrEnum):
    """Who may use a context cache: ``PRIVATE``, its tenant; ``SHARED``, every tenant of the server."""

    PRIVATE = "private"
    SHARED = "shared"

    def owner(self, tenant: str) -> str:
        """Whose context caches a tenant means by this scope."""
        return SHARED_TENANT if self is Scope.SHARED else tenant


def tenant_of_key(key: str) -> str:
    """The tenant's name: a hash, so that neither catalog nor logs hold the key."""
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Quota:
    """What one tenant may keep; None is no limit. ``bytes`` counts KV as computed, each chunk once, and so does
    ``pinned_bytes`` of it that may be pinned."""

    bytes: int | None = None
    caches: int | None = None
    pinned_bytes: int | None = None


UNLIMITED = Quota()


@dataclass(frozen=True, slots=True)
class Quotas:
    """``default`` applies to tenants that have no quota of their own, but not to the shared one."""

    default: Quota = UNLIMITED
    own: Mapping[str, Quota] = field(default_factory=dict)

    def of(self, tenant: str) -> Quota:
        return self.own.get(tenant, UNLIMITED if tenant == SHARED_TENANT else self.default)


NO_QUOTAS = Quotas()


def parse_scope(name: str) -> Scope:
    """The named scope. Raises InvalidRequestError for others."""
    try:
        return Scope(name)
    except ValueError as error:
        known = ", ".join(Scope)
        raise InvalidRequestError(f"Unknown scope {name!r}; known are {known}.", param="scope") from error
