"""Finds and repairs inconsistencies of the catalog; the catalog calls it."""

from __future__ import annotations

from collections.abc import Iterator

from kvlinker.store.catalog.blobs import TokenBlobs
from kvlinker.store.catalog.databases.interface import Connection, Database
from kvlinker.store.catalog.room import release
from kvlinker.store.catalog.rows import CHUNK_COLUMNS, genuine_tokens

ROWS_AT_ONCE = 500
"""The chunks whose token ids are read with one question: all may be more than memory holds, and
take a database longer than it may; chosen by hand."""

_COUNTED = """SELECT tenant, CAST(sum(caches) AS BIGINT), CAST(sum(chunks) AS BIGINT),
        CAST(sum(tokens) AS BIGINT), CAST(sum(nbytes) AS BIGINT) FROM (
        SELECT tenant, count(*) AS caches, 0 AS chunks, 0 AS tokens, 0 AS nbytes
        FROM context_caches GROUP BY tenant
        UNION ALL SELECT tenant, 0, count(*), sum(length), sum(nbytes) FROM chunks GROUP BY tenant
    ) AS rows GROUP BY tenant"""
_KEPT = (
    "SELECT name, caches, chunks, tokens, nbytes FROM tenants WHERE caches != 0 OR chunks != 0 OR"
    " tokens != 0 OR nbytes != 0"
)


def check_catalog(
    database: Database, blobs: TokenBlobs, now: float, *, repair: bool
) -> tuple[str, ...]:
    """Return the faults of the catalog, a line for each; this takes time for large catalogs.

    ``repair`` removes context caches whose token ids were changed, since they cannot be answered,
    and counts accounts again. Each step is one transaction. ``now``, in Unix seconds, is noted with
    what is released.
    """
    faults = list(database.check())
    if faults and repair:
        with database.transaction() as connection:
            connection.execute("REINDEX")
            connection.execute(
                "DELETE FROM context_caches WHERE chunk_key NOT IN (SELECT key FROM chunks)"
            )
            connection.execute(
                "DELETE FROM metadata WHERE number NOT IN (SELECT number FROM context_caches)"
            )
            # the next server that searches indexes them again
            connection.texts.remove_all(connection)
    changed = list(_changed_chunks(database, blobs))
    faults += [f"the token ids of chunk {key} are not what they were" for key in changed]
    with database.transaction() as connection:
        unheld = _unheld_chunks(connection)
        faults += [f"chunk {key} is held by no context cache" for key in unheld]
        if repair:
            connection.executemany(
                "DELETE FROM context_caches WHERE chunk_key = ?", [(key,) for key in changed]
            )
            release(connection, (*changed, *unheld), now)
        faults += [
            f"the account of tenant {tenant} is wrong" for tenant in _wrong_accounts(connection)
        ]
        if repair:
            _count_again(connection)
    return tuple(faults)


def _changed_chunks(database: Database, blobs: TokenBlobs) -> Iterator[str]:
    """Yield the keys of chunks whose token ids were changed from outside."""
    last = ""
    while rows := database.query(
        f"SELECT {CHUNK_COLUMNS} FROM chunks k WHERE k.key > :last ORDER BY k.key LIMIT :limit",
        {"last": last, "limit": ROWS_AT_ONCE},
    ):
        last = rows[-1][0]
        yield from (row[0] for row in rows if genuine_tokens(row, blobs) is None)


def _unheld_chunks(connection: Connection) -> list[str]:
    """Return the keys of rows that should have gone with their last context cache."""
    rows = connection.execute(
        "SELECT key FROM chunks WHERE NOT EXISTS (SELECT 1 FROM context_caches WHERE chunk_key ="
        " key)"
    )
    return [key for (key,) in rows]


def _wrong_accounts(connection: Connection) -> list[str]:
    """Return the tenants of which more or less is recorded than they have."""
    counted, kept = (
        {name: account for name, *account in connection.execute(query).fetchall()}
        for query in (_COUNTED, _KEPT)
    )
    return sorted(
        name for name in counted.keys() | kept.keys() if counted.get(name) != kept.get(name)
    )


def _count_again(connection: Connection) -> None:
    """Count all accounts again."""
    connection.execute("DELETE FROM tenants")
    connection.execute(f"INSERT INTO tenants (name, caches, chunks, tokens, nbytes) {_COUNTED}")
