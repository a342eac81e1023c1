"""Counts the usage of tenants in the catalog, and checks limits before it grows, inside the
catalog's transactions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvlinker.base.errors import PinLimitError, QuotaExceededError
from kvlinker.base.types.chunks import ContextCache
from kvlinker.base.types.tenants import NO_QUOTAS, Quotas
from kvlinker.store.catalog.databases.interface import Connection

TENANT_USAGE = "SELECT caches, chunks, tokens, nbytes FROM tenants WHERE name = :tenant"
PINNED_BYTES = """SELECT tenant, CAST(sum(nbytes) AS BIGINT) FROM chunks
    WHERE key IN (SELECT chunk_key FROM context_caches WHERE pinned) GROUP BY tenant"""


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """The usage of one tenant in the catalog. All counts but ``caches`` count each chunk once."""

    caches: int = 0
    chunks: int = 0
    tokens: int = 0
    bytes: int = 0
    """The bytes of KV as computed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of tenants in the catalog."""

    quotas: Quotas = NO_QUOTAS
    pinned_bytes: int | None = None
    """The bytes of KV as computed that all tenants together may pin; None for no limit."""

    implicit_caches: int | None = None
    """The most implicit context caches of one tenant; None for no limit."""


NO_LIMITS = Limits()


def check_added(connection: Connection, records: Sequence[ContextCache], limits: Limits) -> None:
    """Check that context caches may be added, none of which is there yet.

    Raises QuotaExceededError if a tenant would have more than it may, and PinLimitError if more
    would be pinned.
    """
    chunks = {
        record.chunk_key: record for record in reversed(records)
    }  # the first one that names a chunk counts
    known = _nbytes(connection, chunks)
    caches = Counter(record.tenant for record in records)
    added: Counter[str] = Counter()
    for key in chunks.keys() - known.keys():
        added[chunks[key].tenant] += chunks[key].kv_bytes
    for tenant in sorted(caches):
        row = connection.execute(TENANT_USAGE, {"tenant": tenant}).fetchone()
        _check_quota(
            tenant, TenantUsage(*(row or ())), caches[tenant], added[tenant], limits.quotas
        )
        _check_implicit(
            connection, tenant, [record for record in records if record.tenant == tenant], limits
        )
    pinned = {record.chunk_key: record.tenant for record in records if record.pinned}
    sizes = {key: known.get(key, chunks[key].kv_bytes) for key in pinned}
    _check_pins(connection, pinned, sizes, limits)


def check_pinned(connection: Connection, chunk_key: str, tenant: str, limits: Limits) -> None:
    """Check that a context cache of this chunk may be pinned. Raises PinLimitError if more would be
    than may."""
    _check_pins(connection, {chunk_key: tenant}, _nbytes(connection, [chunk_key]), limits)


def _nbytes(connection: Connection, chunk_keys: Iterable[str]) -> dict[str, int]:
    """Return the bytes of those of the chunks that are in the catalog, by key."""
    keys = json.dumps(list(chunk_keys))
    rows = connection.execute(
        "SELECT key, nbytes FROM chunks WHERE key IN (SELECT value FROM json_each(?))", (keys,)
    )
    return dict(rows.fetchall())


def _check_quota(tenant: str, has: TenantUsage, caches: int, nbytes: int, quotas: Quotas) -> None:
    """Check that a tenant may add ``caches`` context caches and ``nbytes`` bytes of KV. Raises
    QuotaExceededError."""
    quota = quotas.of(tenant)
    for what, limit, old, new, setting in (
        ("context caches", quota.caches, has.caches, caches, "tenant_quota_caches"),
        ("bytes of KV", quota.bytes, has.bytes, nbytes, "tenant_quota_bytes"),
    ):
        if limit is not None and new and old + new > limit:
            raise QuotaExceededError(
                f"The quota of {limit:,} {what} would be exceeded: {old:,} are kept, and this adds"
                f" {new:,}. Delete context caches that are no longer needed, give them a ttl, or"
                f" have a higher {setting} set."
            )


def _check_implicit(
    connection: Connection, tenant: str, records: Sequence[ContextCache], limits: Limits
) -> None:
    """Check that a tenant may have these context caches by the number of implicit ones. Raises
    QuotaExceededError."""
    new, limit = sum(record.implicit_ttl is not None for record in records), limits.implicit_caches
    if limit is None or not new:
        return
    ((old,),) = connection.execute(
        "SELECT count(*) FROM context_caches WHERE tenant = ? AND implicit_ttl IS NOT NULL",
        (tenant,),
    ).fetchall()
    if old + new > limit:
        raise QuotaExceededError(
            f"At most {limit:,} implicit context caches are kept of a tenant, which has {old:,}."
        )


def _check_pins(
    connection: Connection,
    pinned: Mapping[str, str],
    sizes: Mapping[str, int],
    limits: Limits,
) -> None:
    """Check that chunks may be pinned, of which some may be; ``pinned`` gives their tenants and
    ``sizes`` their bytes.

    Raises PinLimitError if all or one of the tenants would have pinned more than they may.
    """
    if not pinned:
        return
    before: dict[str, int] = dict(connection.execute(PINNED_BYTES).fetchall())
    already = connection.execute(
        "SELECT DISTINCT chunk_key FROM context_caches WHERE pinned AND chunk_key IN (SELECT value"
        " FROM json_each(?))",
        (json.dumps(list(pinned)),),
    ).fetchall()
    added: Counter[str] = Counter()
    for key in pinned.keys() - {key for (key,) in already}:
        added[pinned[key]] += sizes[key]
    had, new, limit = sum(before.values()), added.total(), limits.pinned_bytes
    if limit is not None and new and had + new > limit:
        raise PinLimitError(
            f"At most {limit:,} bytes of KV can be pinned, half of the larger of host memory and"
            f" disk: {had:,} are, and this would add {new:,}. Unpin or delete pinned context"
            " caches, or ask the operator for a larger disk_space.",
            param="pinned",
        )
    for tenant, new in sorted(added.items()):
        had, limit = before.get(tenant, 0), limits.quotas.of(tenant).pinned_bytes
        if limit is not None and new and had + new > limit:
            raise PinLimitError(
                f"At most {limit:,} bytes of your KV can be pinned: {had:,} are, and this would add"
                f" {new:,}. Unpin or delete pinned context caches, or ask the server's operator for"
                " a higher tenant_quota_pinned_bytes.",
                param="pinned",
            )
