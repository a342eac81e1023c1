"""Follows chunks that no context cache holds any more: noted in the catalog until no tier can hold
their KV."""

from __future__ import annotations

import json
from collections.abc import Iterable

from kvlinker.store.catalog.databases.interface import Connection, Database
from kvlinker.store.catalog.variants import note_released, release_variants


def release(connection: Connection, chunk_keys: Iterable[str], now: float) -> tuple[str, ...]:
    """Remove those of the chunks that no context cache holds, with their texts and with the
    variants of what is left of no chunk; returns the keys of chunks and variants, and notes them as
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


def released(database: Database, after: float, until: float, *, limit: int) -> dict[str, float]:
    """Return keys that were released in this time and are held by nothing now, and when: any
    ``limit`` of them."""
    rows = database.query(
        "SELECT key, released_at FROM released r WHERE released_at > :after AND released_at <="
        " :until AND NOT EXISTS (SELECT 1 FROM chunks WHERE key = r.key) AND NOT EXISTS (SELECT 1"
        " FROM variants WHERE key = r.key) LIMIT :limit",
        {"after": after, "until": until, "limit": limit},
    )
    return dict(rows)


def forget_released(database: Database, chunk_keys: Iterable[str], until: float) -> None:
    """Forget these keys among those released until then, and those that are held again."""
    with database.transaction() as connection:
        connection.execute(
            "DELETE FROM released AS r WHERE released_at <= :until AND (key IN (SELECT value FROM"
            " json_each(:gone)) OR EXISTS (SELECT 1 FROM chunks WHERE key = r.key) OR EXISTS"
            " (SELECT 1 FROM variants WHERE key = r.key))",
            {"until": until, "gone": json.dumps(list(chunk_keys))},
        )
