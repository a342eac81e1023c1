"""How much tenants have in the catalog, and the limits on it; called inside the catalog's transactions."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvlinker.errors import PinLimitError, QuotaExceededError
from kvlinker.types.tenants import NO_QUOTAS, Quotas

TENANT_USAGE = "SELECT caches, chunks, tokens, nbytes FROM tenants WHERE name = :tenant"
PINNED_BYTES = """SELECT tenant, sum(nbytes) FROM chunks
    WHERE key IN (SELECT chunk_key FROM context_caches WHERE pinned) GROUP BY tenant"""


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
    was_pinned = _pinned_bytes(connection) if pins else {}
    yield
    _check_quotas(connection, limits.quotas, before)
    if pins:
        _check_pins(connection, limits, was_pinned)


def _usages_of(connection: sqlite3.Connection, tenants: Iterable[str]) -> dict[str, TenantUsage]:
    rows = {tenant: connection.execute(TENANT_USAGE, {"tenant": tenant}).fetchone() for tenant in sorted(set(tenants))}
    return {tenant: TenantUsage(*(row or ())) for tenant, row in rows.items()}


def _pinned_bytes(connection: sqlite3.Connection) -> dict[str, int]:
    """Bytes of pinned KV by tenant, each chunk once."""
    return dict(connection.execute(PINNED_BYTES).fetchall())


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


def _check_pins(connection: sqlite3.Connection, limits: Limits, before: dict[str, int]) -> None:
    """Raises PinLimitError where more is pinned than may be, by all or by one tenant; ``before``: what was pinned."""
    after = _pinned_bytes(connection)
    had, has, limit = sum(before.values()), sum(after.values()), limits.pinned_bytes
    if limit is not None and has > limit and has > had:
        raise PinLimitError(
            f"At most {limit:,} bytes of KV can be pinned, half of the larger of host memory and disk: {had:,} are, "
            f"and this would add {has - had:,}. Unpin or delete pinned context caches, or ask the operator "
            "for a larger disk_space.",
            param="pinned",
        )
    for tenant, has in after.items():
        had, limit = before.get(tenant, 0), limits.quotas.of(tenant).pinned_bytes
        if limit is not None and has > limit and has > had:
            raise PinLimitError(
                f"At most {limit:,} bytes of your KV can be pinned: {had:,} are, and this would add {has - had:,}. "
                "Unpin or delete pinned context caches, or ask the server's operator for a higher "
                "tenant_quota_pinned_bytes.",
                param="pinned",
            )
