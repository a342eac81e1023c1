"""How much tenants have in the catalog, and the limits on it; called inside the catalog's transactions."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvlinker.errors import PinLimitError, QuotaExceededError
from kvlinker.tenants import NO_QUOTAS, Quotas

TENANT_USAGE = "SELECT caches, chunks, tokens, nbytes FROM tenants WHERE name = :tenant"
_PINNED = """SELECT coalesce(sum(nbytes), 0) FROM chunks
    WHERE key IN (SELECT chunk_key FROM context_caches WHERE pinned)"""


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What a tenant has. ``tokens`` and ``bytes`` (of KV as computed) count each of its ``chunks`` once."""

    caches: int = 0
    chunks: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """``pinned_bytes``: of KV as computed that may be pinned, over all tenants; None is no limit."""

    quotas: Quotas = NO_QUOTAS
    pinned_bytes: int | None = None


NO_LIMITS = Limits()


@contextmanager
def enforced(
    connection: sqlite3.Connection, limits: Limits, *, tenants: Iterable[str] = (), pins: bool = False
) -> Iterator[None]:
    """Raises QuotaExceededError or PinLimitError after a block that brings one of the ``tenants`` over its quota, or,
    with ``pins``, pins more than may be."""
    before = _usages_of(connection, tenants)
    was_pinned = _pinned_bytes(connection) if pins else 0
    yield
    _check_quotas(connection, limits.quotas, before)
    if pins:
        _check_pins(connection, limits.pinned_bytes, was_pinned)


def _usages_of(connection: sqlite3.Connection, tenants: Iterable[str]) -> dict[str, TenantUsage]:
    rows = {tenant: connection.execute(TENANT_USAGE, {"tenant": tenant}).fetchone() for tenant in sorted(set(tenants))}
    return {tenant: TenantUsage(*(row or ())) for tenant, row in rows.items()}


def _pinned_bytes(connection: sqlite3.Connection) -> int:
    """Bytes of pinned KV of all tenants, each chunk once."""
    return int(connection.execute(_PINNED).fetchone()[0])


def _check_quotas(connection: sqlite3.Connection, quotas: Quotas, before: dict[str, TenantUsage]) -> None:
    """Raises QuotaExceededError where a tenant has more than it may; ``before``: what it had."""
    for tenant, has in _usages_of(connection, before).items():
        quota, had = quotas.of(tenant), before[tenant]
        for what, limit, old, new, setting in (
            ("context caches", quota.caches, had.caches, has.caches, "tenant_quota_caches"),
            ("bytes of KV", quota.bytes, had.bytes, has.bytes, "tenant_quota_bytes"),
        ):
            if limit is not None and new > limit and new > old:
                raise QuotaExceededError(
                    f"The quota of {limit:,} {what} would be exceeded: {old:,} are kept, and this adds {new - old:,}. "
                    "Delete context caches that are no longer needed (DELETE /v1/context_caches/{id}, or by metadata), "
                    f"give them a ttl, or ask the server's operator for a higher {setting}."
                )


def _check_pins(connection: sqlite3.Connection, limit: int | None, before: int) -> None:
    """Raises PinLimitError where more than ``limit`` bytes are pinned; ``before``: how many were."""
    after = _pinned_bytes(connection)
    if limit is not None and after > limit and after > before:
        raise PinLimitError(
            f"At most {limit:,} bytes of KV can be pinned, half of the larger of host memory and disk: {before:,} are, "
            f"and this would add {after - before:,}. Unpin or delete pinned context caches, or ask the operator "
            "for a larger disk_space.",
            param="pinned",
        )
