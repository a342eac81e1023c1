"""A lookup of another tenant's context cache does exactly what a lookup of an unknown one does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvlinker.base.errors import ContextCacheNotFoundError
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.store import Catalog, ContextCache, new_context_cache_id
from tests.store.catalog.databases.test_sqlite import connection_of

NOW = 1000.0


def record(number: int, tenant: str) -> ContextCache:
    chunk = Chunk(tokens=(number,))
    return ContextCache(
        id=new_context_cache_id(),
        tenant=tenant,
        model="tiny",
        fingerprint="weights",
        chunk=chunk,
        chunk_key=chunk_key(chunk, fingerprint="weights", tenant=tenant),
        created_at=NOW,
    )


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    catalog = Catalog(tmp_path / "catalog.sqlite")
    yield catalog
    catalog.close()


LOOKUPS = {
    "get": lambda catalog, cache_id: catalog.get(cache_id, "anna", NOW),
    "list": lambda catalog, cache_id: catalog.list("anna", NOW, limit=5, after=cache_id),
    "update": lambda catalog, cache_id: catalog.update(cache_id, "anna", NOW, name="mine"),
    "delete": lambda catalog, cache_id: catalog.delete(cache_id, "anna", NOW),
}


def steps_of(catalog: Catalog, lookup: str, cache_id: str) -> tuple[list[str], int]:
    """The statements that a lookup runs, but for their values, and the instructions of SQLite's
    machine."""
    connection = connection_of(catalog)
    statements: list[str] = []
    instructions = 0

    def count() -> int:
        nonlocal instructions
        instructions += 1
        return 0

    connection.set_trace_callback(lambda text: statements.append(text.replace(cache_id, "ID")))
    connection.set_progress_handler(count, 1)
    with suppress(ContextCacheNotFoundError):
        LOOKUPS[lookup](catalog, cache_id)
    connection.set_progress_handler(None, 0)
    connection.set_trace_callback(None)
    return statements, instructions


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_same_statements_and_same_steps(catalog: Catalog, lookup: str) -> None:
    foreign = [record(number, "bert") for number in range(300)]
    catalog.add([*foreign, *(record(number, "anna") for number in range(300))])
    unknown = [new_context_cache_id() for _ in foreign]
    steps_of(catalog, lookup, unknown[0])
    seen = [
        {str(steps_of(catalog, lookup, each)) for each in ids}
        for ids in (unknown, [f.id for f in foreign])
    ]
    assert seen[0] == seen[1]
    assert len(seen[0]) == 1


def test_lookups_go_by_owner_and_id(catalog: Catalog) -> None:
    catalog.add([record(1, "anna")])
    statements, _ = steps_of(catalog, "get", new_context_cache_id())
    plan = [row[3] for row in catalog._database.query("EXPLAIN QUERY PLAN " + statements[0], {})]
    assert any("context_caches_by_owner (tenant=? AND id=?)" in step for step in plan), plan
