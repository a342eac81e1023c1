"""A catalog has one schema: files of later ones are refused, and nothing in them is changed."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kvlinker.store import Catalog, StoreError
from kvlinker.store.catalog.databases.schema import SCHEMA_VERSION

NEWER = SCHEMA_VERSION + 1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.sqlite"


def set_version(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as raw:
        raw.execute(f"PRAGMA user_version = {version}")


def test_a_new_file_is_of_the_one_version(path: Path) -> None:
    for _ in range(2):
        Catalog(path).close()
        with closing(sqlite3.connect(path)) as raw:
            assert raw.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


def test_a_later_version_is_refused_and_left_alone(path: Path) -> None:
    Catalog(path).close()
    set_version(path, NEWER)
    before = path.read_bytes()
    message = (
        f"The catalog {path} was written by a newer kvlinker: it has schema {NEWER}, and this"
        f" kvlinker reads only schema {SCHEMA_VERSION}. Use the kvlinker that wrote it, or choose"
        f" another state directory, into which `kvlinker caches import {path}` brings"
    )
    with pytest.raises(StoreError, match=re.escape(message)):
        Catalog(path)
    assert path.read_bytes() == before


def test_a_file_that_is_upgraded_while_it_is_open_is_changed_no_more(path: Path) -> None:
    with closing(Catalog(path)) as catalog, closing(sqlite3.connect(path)) as raw:
        raw.execute(f"PRAGMA user_version = {NEWER}")
        before = list(raw.iterdump())
        with pytest.raises(StoreError, match="a newer kvlinker"):
            catalog.expire(0.0)
        assert list(raw.iterdump()) == before


def test_another_programs_database_is_refused_and_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("CREATE TABLE chunks (something TEXT)")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another program"):
        Catalog(path)
    assert path.read_bytes() == before
