"""Finds where the catalog contradicts itself; the catalog calls it, inside its transactions."""

from __future__ import annotations

import sqlite3

from kvlinker.chunks import packed_chunk_key
from kvlinker.store.catalog_encryption import prefix_of, tokens_of
from kvlinker.store.errors import StoreError
from kvlinker.store.token_blobs import TokenBlobs

_COUNTED = """SELECT tenant, sum(caches), sum(chunks), sum(tokens), sum(nbytes) FROM (
        SELECT tenant, count(*) AS caches, 0 AS chunks, 0 AS tokens, 0 AS nbytes FROM context_caches GROUP BY tenant
        UNION ALL SELECT tenant, 0, count(*), sum(length), sum(nbytes) FROM chunks GROUP BY tenant
    ) GROUP BY tenant"""
_KEPT = "SELECT name, caches, chunks, tokens, nbytes FROM tenants WHERE caches OR chunks OR tokens OR nbytes"


def is_genuine(blobs: TokenBlobs, key: str, fingerprint: str, tenant: str, tokens: bytes, prefix: bytes) -> bool:
    """Whether a chunk's token ids, as its row has them, are those that its key names: SQLite has no checksums."""
    try:
        packed = blobs.open(tokens, tokens_of(key)), blobs.open(prefix, prefix_of(key))
    except StoreError:
        return False
    return packed_chunk_key(*packed, fingerprint=fingerprint, owner=tenant) == key


def unheld_chunks(connection: sqlite3.Connection) -> list[str]:
    """Keys of rows that should have gone with their last context cache."""
    rows = connection.execute(
        "SELECT key FROM chunks WHERE NOT EXISTS (SELECT 1 FROM context_caches WHERE chunk_key = key)"
    )
    return [key for (key,) in rows]


def wrong_accounts(connection: sqlite3.Connection) -> list[str]:
    """Tenants of which more or less is recorded than they have."""
    counted, kept = (
        {name: account for name, *account in connection.execute(query).fetchall()} for query in (_COUNTED, _KEPT)
    )
    return sorted(name for name in counted.keys() | kept.keys() if counted.get(name) != kept.get(name))


def count_again(connection: sqlite3.Connection) -> None:
    """Set all accounts right."""
    connection.execute("DELETE FROM tenants")
    connection.execute(f"INSERT INTO tenants (name, caches, chunks, tokens, nbytes) {_COUNTED}")
