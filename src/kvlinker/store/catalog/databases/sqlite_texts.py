"""Keeps the texts of chunks in SQLite's FTS5 tables, one for each tenant."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from kvlinker.store.catalog.databases.interface import Connection, Database

_FORGETS_AT_ONCE = (3, 42, 0)
"""The version of SQLite from which FTS5 removes a deleted text's words at once; before, they go in
later merges."""

TOKENIZE = "porter unicode61"
"""How FTS5 splits texts into words: English stems, no accents."""


class FTS5Texts:
    """SQLite implementation of Texts, by FTS5."""

    def insert(self, connection: Connection, tenant: str, chunk_key: str, text: str) -> int:
        connection.execute(
            f"INSERT INTO {_table_of(connection, tenant)} (text) VALUES (?)", (text,)
        )
        (number,) = connection.execute("SELECT last_insert_rowid()").fetchone()
        return int(number)

    def remove(self, connection: Connection, tenant: str, number: int | None) -> None:
        if number is not None:
            connection.execute(
                f"DELETE FROM {_table_of(connection, tenant)} WHERE rowid = ?", (number,)
            )

    def remove_all(self, connection: Connection) -> bool:
        numbers = connection.execute("SELECT number FROM search_indexes").fetchall()
        for (number,) in numbers:
            connection.execute(f"DROP TABLE IF EXISTS {_table_name(number)}")
        connection.execute("DELETE FROM search_indexes")
        connection.execute("UPDATE chunks SET text_number = NULL WHERE text_number IS NOT NULL")
        return bool(numbers)

    def find(
        self,
        database: Database,
        words: Sequence[str],
        *,
        tenant: str,
        fingerprint: str,
        condition: str,
        values: Mapping[str, Any],
        limit: int,
    ) -> Sequence[Any]:
        found = database.query(
            "SELECT number FROM search_indexes WHERE tenant = :tenant", {"tenant": tenant}
        )
        if not found:
            return ()
        table = _table_name(found[0][0])
        return database.query(
            f"SELECT h.id, -t.rank, t.text, k.length, h.metadata FROM {table} t CROSS JOIN chunks k"
            " ON k.tenant = :tenant AND k.text_number = t.rowid AND k.fingerprint = :fingerprint"
            " CROSS JOIN context_caches h ON h.number = (SELECT max(c.number) FROM context_caches"
            f" c WHERE c.chunk_key = k.key AND {condition}) WHERE {table} MATCH :match"
            " ORDER BY t.rank LIMIT :limit",
            {
                **values,
                "tenant": tenant,
                "fingerprint": fingerprint,
                "match": " OR ".join(f'"{word}"' for word in words),
                "limit": limit,
            },
        )


def _table_of(connection: Connection, tenant: str) -> str:
    """Return the name of the tenant's table, which is made where it is missing."""
    row = connection.execute(
        "SELECT number FROM search_indexes WHERE tenant = ?", (tenant,)
    ).fetchone()
    if row is not None:
        return _table_name(row[0])
    (number,) = connection.execute(
        "INSERT INTO search_indexes (tenant) VALUES (?) RETURNING number", (tenant,)
    ).fetchone()
    table = _table_name(number)
    connection.execute(f"CREATE VIRTUAL TABLE {table} USING fts5(text, tokenize = '{TOKENIZE}')")
    if sqlite3.sqlite_version_info >= _FORGETS_AT_ONCE:
        connection.execute(f"INSERT INTO {table} ({table}, rank) VALUES ('secure-delete', 1)")
    return table


def _table_name(number: int) -> str:
    """Name the table of the search index with this number."""
    return f"texts_{number}"
