"""A catalog that was harmed from outside says so, is mended by ``check``, and accepts nothing that
would be lost."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.store import Catalog, ContextCache, StoreError, TenantUsage, new_context_cache_id

NOW = 1000.0


def record(number: int, tenant: str = "anna") -> ContextCache:
    chunk = Chunk(tokens=(number, 7, 8))
    return ContextCache(
        id=new_context_cache_id(),
        tenant=tenant,
        model="tiny",
        fingerprint="weights",
        chunk=chunk,
        chunk_key=chunk_key(chunk, fingerprint="weights", tenant=tenant),
        created_at=NOW,
        kv_bytes=10,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.sqlite"


@pytest.fixture
def catalog(path: Path) -> Iterator[Catalog]:
    with closing(Catalog(path)) as catalog:
        yield catalog


def harm(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute(statement, values)


@pytest.mark.parametrize("tokens", [b"\1\0\0\0\7\0\0\0\7\0\0\0", b"\1\0\0", b""])
def test_changed_token_ids_are_never_answered_with(
    path: Path, catalog: Catalog, tokens: bytes
) -> None:
    changed, other = record(1), record(2)
    catalog.add([changed, other])
    harm(path, "UPDATE chunks SET tokens = ? WHERE key = ?", tokens, changed.chunk_key)
    with pytest.raises(StoreError, match="caches check --repair"):
        catalog.get(changed.id, "anna", NOW)
    assert catalog.get(other.id, "anna", NOW) == other
    for repair, found in ((False, True), (True, True), (False, False)):
        faults = catalog.check(repair=repair)
        assert any(changed.chunk_key in fault for fault in faults) == bool(faults) == found
    assert catalog.list("anna", NOW, limit=10).items == (other,)
    assert catalog.usage("anna") == TenantUsage(caches=1, chunks=1, tokens=3, bytes=10)
    assert catalog.released(float("-inf"), float("inf")).keys() == {changed.chunk_key}


def test_wrong_accounts_are_counted_again(path: Path, catalog: Catalog) -> None:
    catalog.add([record(1), record(2), record(1, "bert")])
    harm(path, "UPDATE tenants SET nbytes = nbytes + 1, caches = -3 WHERE name = 'anna'")
    harm(path, "DELETE FROM tenants WHERE name = 'bert'")
    harm(path, "INSERT INTO tenants (name, caches) VALUES ('nobody', 5)")
    assert len(catalog.check()) == 3
    assert len(catalog.check(repair=True)) == 3
    assert catalog.check() == ()
    assert catalog.usage("anna") == TenantUsage(caches=2, chunks=2, tokens=6, bytes=20)
    assert catalog.usage("bert") == TenantUsage(caches=1, chunks=1, tokens=3, bytes=10)
    assert catalog.usage("nobody") == TenantUsage()


def test_chunks_that_nothing_holds_go(path: Path, catalog: Catalog) -> None:
    left = record(1)
    catalog.add([left])
    harm(path, "DELETE FROM context_caches")
    assert len(catalog.check(repair=True)) == 1
    assert catalog.check() == ()
    assert catalog.chunk_keys() == {}


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
        for file in tmp_path.glob("catalog.sqlite*"):
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
