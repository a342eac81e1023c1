"""The catalog's tables, statements and index of texts, as PostgreSQL takes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from kvlinker.store.catalog.databases.interface import Connection, Database
from kvlinker.store.catalog.databases.schema import ACCOUNTS, TABLES

SCHEMA = "kvlinker"

POSTGRES_VERSION = 13
"""The one version of PostgreSQL's tables that is read. A change of ``schema.TABLES``, or of
``TEXT_TABLES``, takes the next number."""

SEARCHED_CHARACTERS = 200_000
"""The most characters at the beginning of a text that are searched; chosen by hand."""

TEXT_TABLES = (
    # PostgreSQL refuses more than 1 MiB of words and positions for a text. Each hyphenated word
    # counts as a whole and by its parts, so that only a trial shows what is too much.
    """CREATE FUNCTION words_of(searched TEXT) RETURNS TSVECTOR IMMUTABLE LANGUAGE plpgsql AS $$
        BEGIN
            LOOP
                BEGIN
                    RETURN to_tsvector('english', searched);
                EXCEPTION WHEN program_limit_exceeded THEN
                    searched := left(searched, length(searched) / 2);
                END;
            END LOOP;
        END $$""",
    f"""CREATE TABLE texts (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        tenant TEXT NOT NULL,
        key TEXT NOT NULL UNIQUE REFERENCES chunks (key) ON DELETE CASCADE,
        text TEXT NOT NULL,
        words TSVECTOR GENERATED ALWAYS AS (words_of(left(text, {SEARCHED_CHARACTERS}))) STORED
    )""",
    "CREATE INDEX texts_by_word ON texts USING gin (words)",
    # a search goes through the rarer of both: the texts of all tenants with a word, or a tenant's
    "CREATE INDEX texts_by_tenant ON texts (tenant)",
)

_FIND = """SELECT h.id, ts_rank(t.words, asked.query, 1), t.text, k.length, h.metadata
    FROM websearch_to_tsquery('english', :words) AS asked(query)
    JOIN texts t ON t.tenant = :tenant AND t.words @@ asked.query
    JOIN chunks k ON k.key = t.key AND k.fingerprint = :fingerprint
    JOIN context_caches h ON h.number = (
        SELECT max(c.number) FROM context_caches c WHERE c.chunk_key = k.key AND {condition}
    )
    ORDER BY 2 DESC, t.number LIMIT :limit"""
"""``ts_rank`` adds up the words that a text has, where ``ts_rank_cd`` would weigh how near together
they are: a query's words are alternatives. 1 divides by the logarithm of the text's length."""

_TYPES = {
    "INTEGER PRIMARY KEY AUTOINCREMENT": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "INTEGER": "BIGINT",
    "REAL": "DOUBLE PRECISION",
    "BLOB": "BYTEA",
    " WITHOUT ROWID": "",
}
_EPOCH = "CAST(extract(epoch FROM clock_timestamp()) AS BIGINT)"


@lru_cache(maxsize=1000)
def translated(statement: str) -> str:
    """Return a statement of the catalog's as PostgreSQL and its driver take it."""
    statement = re.sub(r"INDEXED BY \w+", "", statement).replace("CROSS JOIN", "JOIN")
    # an array, since PostgreSQL takes an index for one, but not for a list whose length is unknown
    statement = re.sub(
        r"IN \(SELECT (.+?) FROM json_each\((:\w+|\?)\)\)",
        r"= ANY(ARRAY(SELECT \1 FROM jsonb_array_elements_text(CAST(\2 AS jsonb)) AS each(value)))",
        statement.replace("%", "%%"),
    )
    return re.sub(r"(?<![:\w]):(\w+)", r"%(\1)s", statement).replace("?", "%s")


def exist(connection: Any) -> bool:
    """Return whether there are tables."""
    query = f"SELECT 1 FROM pg_tables WHERE schemaname = '{SCHEMA}' AND tablename = 'version'"
    return connection.execute(query).fetchone() is not None


def create(connection: Any) -> None:
    """Create the tables, in a transaction of the caller's."""
    if exist(connection):
        return  # by a server that was started at the same time
    connection.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
    for statement in TABLES:
        for word, other in _TYPES.items():
            statement = statement.replace(word, other)
        connection.execute(statement)
    # the order in which variants came, which SQLite's tables have by themselves
    connection.execute("ALTER TABLE variants ADD COLUMN rowid BIGINT GENERATED ALWAYS AS IDENTITY")
    for statement in TEXT_TABLES:
        connection.execute(statement)
    for name, (table, event, statement) in ACCOUNTS.items():
        statement = statement.replace("unixepoch()", _EPOCH)
        connection.execute(
            f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {statement};"
            " RETURN NULL; END $$"
        )
        connection.execute(
            f"CREATE TRIGGER {name} AFTER {event} ON {table} FOR EACH ROW EXECUTE FUNCTION {name}()"
        )
    connection.execute("CREATE TABLE version (number BIGINT NOT NULL)")
    connection.execute("INSERT INTO version VALUES (%s)", (POSTGRES_VERSION,))


class PostgresTexts:
    """PostgreSQL implementation of Texts, by its full-text search. A foreign key deletes a text
    with its chunk."""

    def insert(self, connection: Connection, tenant: str, chunk_key: str, text: str) -> int:
        (number,) = connection.execute(
            "INSERT INTO texts (tenant, key, text) VALUES (?, ?, ?) RETURNING number",
            (tenant, chunk_key, text.replace("\0", " ")),
        ).fetchone()
        return int(number)

    def remove(self, connection: Connection, tenant: str, number: int | None) -> None:
        """Do nothing: the foreign key has deleted the text."""

    def remove_all(self, connection: Connection) -> bool:
        removed = connection.execute("DELETE FROM texts RETURNING number").fetchall()
        connection.execute("UPDATE chunks SET text_number = NULL WHERE text_number IS NOT NULL")
        return bool(removed)

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
        return database.query(
            _FIND.format(condition=condition),
            {
                **values,
                "tenant": tenant,
                "fingerprint": fingerprint,
                "words": " or ".join(f'"{word}"' for word in words),
                "limit": limit,
            },
        )
