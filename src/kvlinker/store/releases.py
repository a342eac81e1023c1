"""Chunks that no context cache holds any more, noted until no tier can hold their KV; the catalog calls it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from kvlinker.store.database import Database
from kvlinker.store.variants import release_variants


def release(connection: sqlite3.Connection, chunk_keys: Iterable[str], now: float) -> tuple[str, ...]:
    """Remove those of the chunks that no context cache holds, with the variants of what is left of no chunk; returns
    the keys of both, and notes them as released. Called inside a transaction."""
    gone = []
    for key in chunk_keys:
        removed = connection.execute(
            "DELETE FROM chunks WHERE key = :key"
            " AND NOT EXISTS (SELECT 1 FROM context_caches WHERE chunk_key = :key)"
            " RETURNING key, fingerprint, content",
            {"key": key},
        ).fetchall()
        for chunk_key, *owner in removed:
            gone.append(chunk_key)
            gone += release_variants(connection, *owner)
    connection.executemany("INSERT OR REPLACE INTO released VALUES (?, ?)", [(key, now) for key in gone])
    return tuple(gone)


def released(database: Database, after: float, until: float) -> tuple[str, ...]:
    """The keys that were released in this time and are held by nothing now."""
    rows = database.query(
        "SELECT key FROM released r WHERE released_at > :after AND released_at <= :until"
        " AND NOT EXISTS (SELECT 1 FROM chunks WHERE key = r.key)"
        " AND NOT EXISTS (SELECT 1 FROM variants WHERE key = r.key)",
        {"after": after, "until": until},
    )
    return tuple(key for (key,) in rows)


def forget_released(database: Database, until: float) -> None:
    with database.transaction() as connection:
        connection.execute("DELETE FROM released WHERE released_at <= ?", (until,))
