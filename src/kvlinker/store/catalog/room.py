"""Makes room in the catalog for context caches that are to be entered, inside the catalog's
transactions."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from kvlinker.base.errors import PinLimitError, QuotaExceededError
from kvlinker.base.types.chunks import ContextCache
from kvlinker.store.catalog.databases.interface import Connection
from kvlinker.store.catalog.limits import Limits, check_added
from kvlinker.store.catalog.variants import note_released, release_variants


class Room(NamedTuple):
    """Counts the context caches and chunks that were evicted to make room for new context
    caches."""

    evicted: int = 0
    """The number of implicit context caches."""

    released: tuple[str, ...] = ()
    """Chunk keys that no context cache holds any more, as ``Catalog.delete`` returns them."""


def make_room(
    connection: Connection,
    records: Sequence[ContextCache],
    limits: Limits,
    now: float,
    *,
    kept: Collection[str] = (),
) -> Room:
    """Make room for new context caches. If a limit would be exceeded, expired context caches are
    removed; if a quota still would be, also implicit ones of the same tenants, the least recently
    used first. Ids in ``kept`` stay.

    Raises QuotaExceededError and PinLimitError if that is not enough; the caller's transaction then
    undoes it. ``now``: Unix seconds.
    """
    if _excess(connection, records, limits) is None:
        return Room()
    tenants = {record.tenant for record in records}
    released = list(_remove(connection, _expired(connection, tenants, now), now))
    implicit = _least_recent(connection, tenants, kept)
    evicted, at_once, grows = 0, 1, True
    while (excess := _excess(connection, records, limits)) is not None:
        gone = implicit[evicted : evicted + at_once]
        if not gone or isinstance(excess, PinLimitError):
            raise excess
        connection.execute("SAVEPOINT evicting")
        removed = _remove(connection, gone, now)
        if len(gone) > 1 and _excess(connection, records, limits) is None:  # fewer may do
            connection.execute("ROLLBACK TO evicting")
            at_once, grows = len(gone) // 2, False
        else:
            released += removed
            evicted += len(gone)
            # Each look at the limits reads all records, so that what is needed is doubled up to,
            # and then halved down.
            at_once = 2 * at_once if grows else max(1, at_once // 2)
        connection.execute("RELEASE evicting")
    held = {record.chunk_key for record in records}
    return Room(evicted, tuple(key for key in released if key not in held))


def remove_expired(
    connection: Connection, now: float, *, limit: int
) -> tuple[int, tuple[str, ...]]:
    """Remove expired context caches of all tenants, ``limit`` at most; returns how many, and
    released chunk keys."""
    rows = connection.execute(
        "SELECT number FROM context_caches WHERE expires_at <= ? ORDER BY expires_at LIMIT ?",
        (now, limit),
    )
    numbers = [number for (number,) in rows]
    return len(numbers), _remove(connection, numbers, now)


def _excess(
    connection: Connection, records: Sequence[ContextCache], limits: Limits
) -> QuotaExceededError | PinLimitError | None:
    """Return the error of the limit that keeps the records from being entered, None if they fit."""
    try:
        check_added(connection, records, limits)
    except (QuotaExceededError, PinLimitError) as error:
        return error
    return None


def _expired(connection: Connection, tenants: Collection[str], now: float) -> list[int]:
    """Return the numbers of expired context caches that count against limits of the tenants: their
    own, and what is pinned."""
    rows = connection.execute(
        "SELECT number FROM context_caches WHERE expires_at <= ? AND (pinned OR tenant IN (SELECT"
        " value FROM json_each(?)))",
        (now, json.dumps(list(tenants))),
    )
    return [number for (number,) in rows]


def _least_recent(
    connection: Connection, tenants: Collection[str], kept: Collection[str]
) -> list[int]:
    """Return the numbers of the tenants' implicit context caches by last use, without those in
    ``kept``."""
    rows = connection.execute(
        "SELECT number, id FROM context_caches WHERE tenant IN (SELECT value FROM json_each(?))"
        " AND implicit_ttl IS NOT NULL ORDER BY expires_at - implicit_ttl, number",
        (json.dumps(list(tenants)),),
    )
    return [number for number, cache_id in rows if cache_id not in kept]


def _remove(connection: Connection, numbers: Sequence[int], now: float) -> tuple[str, ...]:
    """Remove context caches by number; returns released chunk keys."""
    removed = connection.execute(
        "DELETE FROM context_caches WHERE number IN (SELECT CAST(value AS BIGINT) FROM"
        " json_each(?)) RETURNING chunk_key",
        (json.dumps(numbers),),
    ).fetchall()
    return release(connection, {key for (key,) in removed}, now)


def release(connection: Connection, chunk_keys: Iterable[str], now: float) -> tuple[str, ...]:
    """Remove those of the chunks that no context cache holds, with their texts and with the
    variants of chunks that are gone; returns the keys of chunks and variants, and notes them as
    released. Called inside a transaction."""
    gone = []
    for key in chunk_keys:
        removed = connection.execute(
            "DELETE FROM chunks WHERE key = :key"
            " AND NOT EXISTS (SELECT 1 FROM context_caches WHERE chunk_key = :key)"
            " RETURNING key, tenant, text_number, fingerprint, content",
            {"key": key},
        ).fetchall()
        for chunk_key, tenant, text_number, *owner in removed:
            gone.append(chunk_key)
            connection.texts.remove(connection, tenant, text_number)
            gone += release_variants(connection, *owner)
    note_released(connection, gone, now)
    return tuple(gone)
