"""Changes a catalog's rows behind its back."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from kvlinker.store.catalog.databases.postgresql_tables import SCHEMA, translated


def harm(place: Path | str, statement: str, *values: object) -> list[Any]:
    """Run a statement by a connection of its own, without checks; returns its rows, if any."""
    if isinstance(place, Path):
        with closing(sqlite3.connect(place)) as raw, raw:
            return raw.execute(statement, values).fetchall()
    import psycopg

    with psycopg.connect(place) as connection:
        connection.execute(f"SET search_path TO {SCHEMA}")
        cursor = connection.execute(translated(statement), values)
        return cursor.fetchall() if cursor.description else []
