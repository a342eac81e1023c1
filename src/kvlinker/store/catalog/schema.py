"""Creates the tables of the catalog, and upgrades an older file to this version."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping

from kvlinker.base.types.chunks import content_of

SCHEMA_VERSION = 6

_FIRST = (
    """CREATE TABLE chunks (
        key TEXT PRIMARY KEY,
        fingerprint TEXT NOT NULL,
        tenant TEXT NOT NULL,
        tokens BLOB NOT NULL,  -- little-endian uint32, as prefix
        prefix BLOB NOT NULL,
        created_at REAL NOT NULL
    )""",
    """CREATE TABLE context_caches (
        number INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order of creation within one created_at
        id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        model TEXT NOT NULL,
        name TEXT,
        metadata TEXT NOT NULL,  -- a JSON object of strings
        created_at REAL NOT NULL,
        expires_at REAL,
        chunk_key TEXT NOT NULL REFERENCES chunks (key)
    )""",
    "CREATE INDEX context_caches_by_tenant ON context_caches (tenant, created_at, number)",
    "CREATE INDEX context_caches_by_chunk ON context_caches (chunk_key)",
    "CREATE INDEX context_caches_by_expiry ON context_caches (expires_at) WHERE expires_at IS NOT NULL",
)
_SECOND = (
    "ALTER TABLE chunks ADD COLUMN content TEXT NOT NULL DEFAULT ''",
    "CREATE INDEX chunks_by_content ON chunks (fingerprint, tenant, content)",
    """CREATE TABLE variants (
        key TEXT PRIMARY KEY,
        fingerprint TEXT NOT NULL,
        tenant TEXT NOT NULL,
        content TEXT NOT NULL,
        prefix BLOB NOT NULL,  -- little-endian uint32
        contextualization TEXT NOT NULL,  -- JSON
        reuse REAL NOT NULL  -- Cache-Craft's f_r
    )""",
    "CREATE INDEX variants_by_content ON variants (fingerprint, tenant, content)",
    "CREATE INDEX variants_by_reuse ON variants (reuse)",
)

_THIRD = (
    "ALTER TABLE chunks ADD COLUMN length INTEGER NOT NULL DEFAULT 0",  # tokens
    "ALTER TABLE chunks ADD COLUMN nbytes INTEGER NOT NULL DEFAULT 0",  # of KV as computed; 0: not known yet
    "UPDATE chunks SET length = length(tokens) / 4",
    "CREATE INDEX chunks_without_size ON chunks (fingerprint) WHERE nbytes = 0",
    "CREATE INDEX chunks_by_tenant ON chunks (tenant, key)",
    "ALTER TABLE context_caches ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0",
    "CREATE INDEX context_caches_pinned ON context_caches (chunk_key) WHERE pinned",
    # another tenant's id is as far from a match in this index as an unknown one
    "CREATE INDEX context_caches_by_owner ON context_caches (tenant, id)",
    """CREATE TABLE tenants (
        name TEXT PRIMARY KEY,
        caches INTEGER NOT NULL DEFAULT 0,
        chunks INTEGER NOT NULL DEFAULT 0,
        tokens INTEGER NOT NULL DEFAULT 0,  -- of its chunks, as nbytes
        nbytes INTEGER NOT NULL DEFAULT 0
    ) WITHOUT ROWID""",
    "INSERT INTO tenants (name, caches) SELECT tenant, count(*) FROM context_caches GROUP BY tenant",
    """INSERT INTO tenants (name, chunks, tokens) SELECT tenant, count(*), sum(length) FROM chunks
        WHERE true GROUP BY tenant ON CONFLICT DO UPDATE SET chunks = excluded.chunks, tokens = excluded.tokens""",
    """CREATE TRIGGER context_cache_added AFTER INSERT ON context_caches BEGIN
        INSERT INTO tenants (name, caches) VALUES (NEW.tenant, 1) ON CONFLICT DO UPDATE SET caches = caches + 1;
    END""",
    """CREATE TRIGGER context_cache_removed AFTER DELETE ON context_caches BEGIN
        UPDATE tenants SET caches = caches - 1 WHERE name = OLD.tenant;
    END""",
    """CREATE TRIGGER chunk_added AFTER INSERT ON chunks BEGIN
        INSERT INTO tenants (name, chunks, tokens, nbytes) VALUES (NEW.tenant, 1, NEW.length, NEW.nbytes)
        ON CONFLICT DO UPDATE SET chunks = chunks + 1, tokens = tokens + NEW.length, nbytes = nbytes + NEW.nbytes;
    END""",
    """CREATE TRIGGER chunk_sized AFTER UPDATE OF nbytes ON chunks BEGIN
        UPDATE tenants SET nbytes = nbytes - OLD.nbytes + NEW.nbytes WHERE name = NEW.tenant;
    END""",
    """CREATE TRIGGER chunk_removed AFTER DELETE ON chunks BEGIN
        UPDATE tenants SET chunks = chunks - 1, tokens = tokens - OLD.length, nbytes = nbytes - OLD.nbytes
        WHERE name = OLD.tenant;
    END""",
    """CREATE TABLE metadata (
        tenant TEXT NOT NULL,
        key TEXT NOT NULL,
        value TEXT NOT NULL,
        created_at REAL NOT NULL,
        number INTEGER NOT NULL REFERENCES context_caches (number) ON DELETE CASCADE,
        PRIMARY KEY (tenant, key, value, created_at, number)
    ) WITHOUT ROWID""",
    "CREATE INDEX metadata_by_number ON metadata (number)",
    "CREATE TABLE encryption (sealed BLOB NOT NULL)",  # one row where token ids are encrypted: it opens with the key
    # chunks that were removed here, until it is certain that no tier holds them any more
    "CREATE TABLE released (key TEXT PRIMARY KEY, released_at REAL NOT NULL) WITHOUT ROWID",
)

_FOURTH = (
    # where listings go on whose last item was removed
    """CREATE TABLE removed_positions (
        tenant TEXT NOT NULL,
        id TEXT NOT NULL,
        created_at REAL NOT NULL,
        number INTEGER NOT NULL,
        removed_at INTEGER NOT NULL,  -- Unix seconds
        PRIMARY KEY (tenant, id)
    ) WITHOUT ROWID""",
    "CREATE INDEX removed_positions_by_time ON removed_positions (removed_at)",
    """CREATE TRIGGER context_cache_position AFTER DELETE ON context_caches BEGIN
        INSERT INTO removed_positions VALUES
            (OLD.tenant, OLD.id, OLD.created_at, OLD.number, CAST(strftime('%s', 'now') AS INTEGER));
    END""",
)

_FIFTH = (
    "ALTER TABLE chunks ADD COLUMN text_number INTEGER",  # of its text in the tenant's search index; NULL: not there
    "CREATE INDEX chunks_by_text ON chunks (tenant, text_number) WHERE text_number IS NOT NULL",
    "CREATE INDEX chunks_without_text ON chunks (fingerprint) WHERE text_number IS NULL",
    # the texts of the tenant's chunks are in the FTS5 table texts_<number>
    "CREATE TABLE search_indexes (number INTEGER PRIMARY KEY, tenant TEXT NOT NULL UNIQUE)",
)

_SIXTH = (
    # seconds to live from the last use, of those that a prompt brought; NULL: created by name
    "ALTER TABLE context_caches ADD COLUMN implicit_ttl REAL",
    "CREATE INDEX context_caches_implicit ON context_caches (tenant, expires_at - implicit_ttl)"
    " WHERE implicit_ttl IS NOT NULL",
)


def upgrade(connection: sqlite3.Connection, version: int) -> None:
    """Bring the file from ``version`` (0: empty) to SCHEMA_VERSION, inside the caller's transaction."""
    if version < 1:
        _run(connection, _FIRST)
    if version < 2:
        _run(connection, _SECOND)
        for key, tokens in connection.execute("SELECT key, tokens FROM chunks").fetchall():
            connection.execute("UPDATE chunks SET content = ? WHERE key = ?", (content_of(tokens), key))
    if version < 3:
        _run(connection, _THIRD)
        for number, metadata in connection.execute("SELECT number, metadata FROM context_caches").fetchall():
            index_metadata(connection, number, json.loads(metadata))
    if version < 4:
        _run(connection, _FOURTH)
    if version < 5:
        _run(connection, _FIFTH)
    if version < 6:
        _run(connection, _SIXTH)
    if version < SCHEMA_VERSION:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def index_metadata(connection: sqlite3.Connection, number: int, metadata: Mapping[str, str]) -> None:
    """Make a context cache, which has no entries in ``metadata``, findable by its pairs."""
    connection.executemany(
        "INSERT INTO metadata SELECT tenant, ?, ?, created_at, number FROM context_caches WHERE number = ?",
        [(key, value, number) for key, value in metadata.items()],
    )


def _run(connection: sqlite3.Connection, statements: Iterable[str]) -> None:
    for statement in statements:
        connection.execute(statement)
