"""The tables of the catalog, and how an older file becomes one of this version."""

from __future__ import annotations

import sqlite3

from kvlinker.chunks import content_of

SCHEMA_VERSION = 2

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


def upgrade(connection: sqlite3.Connection, version: int) -> None:
    """Bring the file from ``version`` (0: empty) to SCHEMA_VERSION, inside the caller's transaction."""
    if version < 1:
        for statement in _FIRST:
            connection.execute(statement)
    if version < 2:
        for statement in _SECOND:
            connection.execute(statement)
        for key, tokens in connection.execute("SELECT key, tokens FROM chunks").fetchall():
            connection.execute("UPDATE chunks SET content = ? WHERE key = ?", (content_of(tokens), key))
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
