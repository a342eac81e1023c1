"""Keeps the texts of chunks in FTS5 tables, one for each tenant, inside the catalog's transactions.

Each tenant has a table of its own because BM25 weighs a word by the number of texts that have it:
in one table for all, scores and times would tell a tenant about the texts of others.
"""

from __future__ import annotations

import sqlite3

_FORGETS_AT_ONCE = (3, 42, 0)
"""The version of SQLite from which FTS5 removes a deleted text's words at once; before, they go in
later merges."""


def insert_text(connection: sqlite3.Connection, chunk_key: str, text: str) -> None:
    """Keep the text of a chunk, unless the chunk is gone or has its text here already."""
    row = connection.execute(
        "SELECT tenant FROM chunks WHERE key = ? AND text_number IS NULL", (chunk_key,)
    ).fetchone()
    if row is not None:
        number = connection.execute(
            f"INSERT INTO {_table_of(connection, row[0])} (text) VALUES (?)", (text,)
        ).lastrowid
        connection.execute("UPDATE chunks SET text_number = ? WHERE key = ?", (number, chunk_key))


def remove_text(connection: sqlite3.Connection, tenant: str, number: int | None) -> None:
    """Remove the text of a tenant's chunk; None for a chunk that has none here."""
    if number is not None:
        connection.execute(
            f"DELETE FROM {_table_of(connection, tenant)} WHERE rowid = ?", (number,)
        )


def remove_all_texts(connection: sqlite3.Connection) -> bool:
    """Remove the texts of all tenants; returns whether there were any."""
    numbers = connection.execute("SELECT number FROM search_indexes").fetchall()
    for (number,) in numbers:
        connection.execute(f"DROP TABLE IF EXISTS {table_name(number)}")
    connection.execute("DELETE FROM search_indexes")
    connection.execute("UPDATE chunks SET text_number = NULL WHERE text_number IS NOT NULL")
    return bool(numbers)


def _table_of(connection: sqlite3.Connection, tenant: str) -> str:
    """Return the name of the tenant's table, which is made where it is missing."""
    row = connection.execute(
        "SELECT number FROM search_indexes WHERE tenant = ?", (tenant,)
    ).fetchone()
    if row is not None:
        return table_name(row[0])
    number = connection.execute(
        "INSERT INTO search_indexes (tenant) VALUES (?)", (tenant,)
    ).lastrowid
    assert number is not None
    table = table_name(number)
    connection.execute(
        f"CREATE VIRTUAL TABLE {table} USING fts5(text, tokenize = 'porter unicode61')"
    )
    if sqlite3.sqlite_version_info >= _FORGETS_AT_ONCE:
        connection.execute(f"INSERT INTO {table} ({table}, rank) VALUES ('secure-delete', 1)")
    return table


def table_name(number: int) -> str:
    """Name the table of the search index with this number."""
    return f"texts_{number}"
