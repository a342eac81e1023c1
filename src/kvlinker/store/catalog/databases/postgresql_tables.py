"""The catalog's tables and statements, as PostgreSQL takes them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from kvlinker.store.catalog.databases.postgresql_texts import TEXT_TABLES
from kvlinker.store.catalog.databases.schema import ACCOUNTS, SCHEMA_VERSION, TABLES

SCHEMA = "kvlinker"

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
    connection.execute("INSERT INTO version VALUES (%s)", (SCHEMA_VERSION,))
