"""Follows chunks that no context cache holds any more: noted in the catalog until no tier can hold
their KV."""

from __future__ import annotations

from collections.abc import Iterable

from kvlinker.store.catalog.databases.interface import Connection
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
