"""What only a catalog in a file can meet: damage, removal, readers of the file; and how it is
read."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from kvlinker.store import Catalog, StoreError
from kvlinker.store.catalog.databases.sqlite import SQLiteDatabase
from kvlinker.store.format.encryption import Cipher
from tests.store.catalog.test_catalog_check import NOW, record
from tests.store.catalog.test_search import TEXTS, add, search
from tests.store.catalog.test_search import record as text_record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "catalog.sqlite"


def connection_of(catalog: Catalog) -> sqlite3.Connection:
    assert isinstance(catalog._database, SQLiteDatabase)
    return catalog._database._connection


@pytest.fixture
def catalog(path: Path) -> Iterator[Catalog]:
    with closing(Catalog(path)) as catalog:
        yield catalog


@contextmanager
def plan_of_last(catalog: Catalog) -> Iterator[list[str]]:
    """Yields a list, which has the plan of the block's last query behind the block."""
    asked: list[tuple[str, dict[str, object]]] = []
    query = catalog._database.query

    def listen(statement: str, values: dict[str, object]) -> object:
        asked.append((statement, values))
        return query(statement, values)

    plan: list[str] = []
    with mock.patch.object(catalog._database, "query", listen):
        yield plan
    plan += [row[-1] for row in query(f"EXPLAIN QUERY PLAN {asked[-1][0]}", asked[-1][1])]


def test_a_file_that_is_no_database_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(StoreError, match=r"(?s)catalog\.sqlite is damaged.*Move it away"):
        Catalog(path)


def test_damage_inside_the_file_is_found_when_it_is_opened(path: Path, catalog: Catalog) -> None:
    catalog.add([record(number) for number in range(200)])
    catalog.close()
    data = bytearray(path.read_bytes())
    for page in range(4096, len(data), 4096):
        data[page : page + 16] = b"\xff" * 16
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"catalog\.sqlite is damaged"):
        Catalog(path)


def test_a_path_that_cannot_be_a_catalog_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "catalog.sqlite"):
        with pytest.raises(StoreError, match=str(path)):
            Catalog(path)


def test_the_file_is_for_its_owner_only(path: Path, catalog: Catalog) -> None:
    catalog.add([record(0)])
    files = list(path.parent.iterdir())
    assert {each.name for each in files} == {
        "catalog.sqlite",
        "catalog.sqlite-wal",
        "catalog.sqlite-shm",
        "lock",
    }
    assert all(each.stat().st_mode & 0o077 == 0 for each in files)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_catalog_that_was_removed_accepts_nothing(
    path: Path, catalog: Catalog, replaced: bool
) -> None:
    kept = record(1)
    catalog.add([kept])
    catalog.persist()
    for file in path.parent.iterdir():
        file.unlink()
    if replaced:
        Catalog(path).close()
    with pytest.raises(StoreError, match="removed or replaced"):
        catalog.add([record(2)])
    with pytest.raises(StoreError, match="removed or replaced"):
        catalog.delete(kept.id, "anna", NOW)
    assert catalog.get(kept.id, "anna", NOW) == kept
    catalog.close()
    with closing(Catalog(path)) as new:
        assert new.tenants() == ()
        new.add([record(2)])


def test_what_was_persisted_is_in_the_files(path: Path, catalog: Catalog, tmp_path: Path) -> None:
    """Also where the process has not closed the catalog, and whatever SQLite has moved from the log
    by then."""
    for number in range(3):
        added = record(number)
        catalog.add([added])
        catalog.persist()
        copy = tmp_path / f"copy{number}"
        copy.mkdir()
        for file in path.parent.glob("catalog.sqlite*"):
            if not file.name.endswith("-shm"):
                (copy / file.name).write_bytes(file.read_bytes())
        with closing(Catalog(copy / "catalog.sqlite")) as found:
            assert found.get(added.id, "anna", NOW) == added


def test_a_file_that_is_overwritten_while_in_use_gives_no_other_answers(path: Path) -> None:
    records = [record(number) for number in range(300)]
    with closing(Catalog(path)) as catalog:
        catalog.add(records)
    with closing(Catalog(path)) as catalog:
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(bytes(range(1, 255)) * (size // 254 - 20))
        for each in records[::10]:
            with suppress(StoreError):
                assert catalog.get(each.id, "anna", NOW) in (each, None)
    with pytest.raises(StoreError, match="Move it away"):
        Catalog(path)


def test_encrypting_a_catalog_removes_its_texts(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    plain = Catalog(path)
    add(plain, text_record("the secret formula"))
    plain.close()
    assert b"formula" in path.read_bytes()
    encrypted = Catalog(path, Cipher(b"k" * 32))
    try:
        assert search(encrypted, "formula") == ()
        assert len(encrypted.without_text("weights", limit=10)) == 1
    finally:
        encrypted.close()
    assert b"formula" not in path.read_bytes()


def test_ordered_by_the_index(catalog: Catalog) -> None:
    """The best matches come without sorting all that match."""
    add(catalog, *map(text_record, TEXTS))
    connection = connection_of(catalog)
    statements: list[str] = []
    connection.set_trace_callback(statements.append)
    search(catalog, "Oslo")
    connection.set_trace_callback(None)
    (statement,) = [each for each in statements if each.startswith("SELECT h.id")]
    plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}")]
    assert not any("ORDER BY" in step for step in plan), plan


@pytest.mark.parametrize("metadata", [{}, {"source": "a.md"}], ids=["all", "by metadata"])
def test_a_page_far_behind_costs_no_more_than_the_first(
    catalog: Catalog, metadata: dict[str, str]
) -> None:
    """An index is read from the page's time of creation on, and nothing is sorted."""
    first, second = (replace(record(number), metadata={"source": "a.md"}) for number in (1, 2))
    catalog.add([first, second])
    with plan_of_last(catalog) as plan:
        assert catalog.list(
            "anna", NOW, limit=5, after=first.id, order="asc", metadata=metadata
        ).items
    assert "created_at" in plan[0], plan
    assert not any("SCAN" in line or "TEMP B-TREE" in line for line in plan), plan


def test_a_few_chunks_that_are_near_cost_no_look_at_all_of_the_model(catalog: Catalog) -> None:
    found = text_record(TEXTS[0])
    add(catalog, found)
    vector = np.ones(1, np.float32)
    catalog.vectors.add("one", {found.chunk_key: vector})
    with plan_of_last(catalog) as plan:
        assert catalog.vectors.nearest(
            vector, embedder="one", tenant="anna", fingerprint="weights", now=NOW, limit=1
        )
    assert "(tenant=? AND key=?)" in plan[0], plan
