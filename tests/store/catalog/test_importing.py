"""Catalogs of earlier versions are upgraded, and others' context caches imported."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.cli import app
from kvlinker.store import Catalog, ContextCache, StoreError, load_cipher
from kvlinker.store.format.encryption import Cipher

OLD_TABLES = """
ALTER TABLE chunks RENAME TO new_chunks;
ALTER TABLE context_caches RENAME TO new_caches;
CREATE TABLE chunks AS SELECT key, fingerprint, tenant, tokens, prefix FROM new_chunks;
CREATE TABLE context_caches AS SELECT id, tenant, model, name, metadata, created_at, expires_at,
    chunk_key FROM new_caches;
DROP TABLE metadata; DROP TABLE vectors; DROP TABLE new_caches; DROP TABLE new_chunks;
PRAGMA user_version = 3;
"""
"""An early version's tables had fewer columns."""

KEY = "11" * 32


def record(number: int, *, tenant: str = "anna", expires_at: float | None = None) -> ContextCache:
    chunk = Chunk(tokens=(number, 7), prefix=(1,))
    return ContextCache(
        id=f"cc_{number}",
        tenant=tenant,
        model="tiny",
        fingerprint="sha256:weights",
        chunk=chunk,
        chunk_key=chunk_key(chunk, fingerprint="sha256:weights", tenant=tenant),
        created_at=float(number),
        expires_at=expires_at,
        name=f"number {number}",
        metadata={"source": "notes.md"},
        kv_bytes=0,
    )


def change(path: Path, script: str) -> None:
    with closing(sqlite3.connect(path)) as raw:
        raw.executescript(script)


def older(path: Path, *records: ContextCache, cipher: Cipher | None = None) -> None:
    """Write a catalog as an early version did."""
    with closing(Catalog(path, cipher)) as catalog:
        catalog.add(records)
    change(path, OLD_TABLES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    return folder / "catalog.sqlite"


@pytest.mark.parametrize("key", [None, KEY])
def test_an_earlier_catalog_is_upgraded_and_kept_as_it_was(path: Path, key: str | None) -> None:
    cipher = load_cipher(None if key is None else SecretStr(key))
    records = [record(1), record(2, tenant="otto"), record(3, expires_at=time.time() + 1000)]
    older(path, *records, cipher=cipher)
    before = path.read_bytes()
    for _ in range(2):
        with closing(Catalog(path, cipher)) as catalog:
            found = {
                cache.id: cache
                for tenant in catalog.tenants()
                for cache in catalog.list(tenant, 0.0, limit=9, metadata={"source": "notes.md"})[0]
            }
            assert found == {each.id: each for each in records}
            assert catalog.usage("anna").caches == 2
            assert catalog.check() == ()
    backup = path.with_name("catalog.sqlite.schema-3")
    assert backup.read_bytes() == before
    assert {file.name for file in path.parent.iterdir()} == {path.name, backup.name, "lock"}


def test_keys_that_were_made_in_another_way_are_made_anew(path: Path) -> None:
    """Their KV is computed again; names and ids are as they were."""
    older(path, record(1))
    change(path, "UPDATE chunks SET key = 'old'; UPDATE context_caches SET chunk_key = 'old';")
    with closing(Catalog(path)) as catalog:
        assert catalog.get("cc_1", "anna", 0.0) == record(1)


def test_what_cannot_be_read_is_left_out(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older(path, *(record(number) for number in range(4)))
    change(
        path,
        "UPDATE context_caches SET metadata = '{' WHERE id = 'cc_0';"
        "UPDATE context_caches SET chunk_key = 'none' WHERE id = 'cc_1';"
        f"UPDATE chunks SET tokens = x'00' WHERE key = '{record(2).chunk_key}';",
    )
    with closing(Catalog(path)) as catalog:
        assert [cache.id for cache in catalog.list("anna", 0.0, limit=9)[0]] == ["cc_3"]
    assert "1 context caches, 3 that could not be read" in caplog.text


def test_an_upgrade_that_was_interrupted_begins_again(path: Path) -> None:
    older(path, record(1))
    path.with_name("catalog.sqlite.new").write_text("half of it")
    with closing(Catalog(path)) as catalog:
        assert catalog.get("cc_1", "anna", 0.0) == record(1)


def test_a_catalog_in_use_is_not_upgraded(path: Path, tmp_path: Path) -> None:
    with closing(Catalog(path)):
        change(path, "PRAGMA user_version = 3")
        with pytest.raises(StoreError, match="is in use"):
            Catalog(path)
    assert not path.with_name("catalog.sqlite.schema-3").exists()


def test_an_encrypted_catalog_needs_its_key(path: Path) -> None:
    older(path, record(1), cipher=load_cipher(SecretStr(KEY)))
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"is encrypted\. Give its key"):
        Catalog(path)
    assert path.read_bytes() == before


def test_import(path: Path, tmp_path: Path) -> None:
    """Of another state directory, whatever version wrote it; twice is as good as once."""
    place = tmp_path / "other"
    place.mkdir()
    older(place / "catalog.sqlite", record(1), record(2), record(3, expires_at=5.0))
    with closing(Catalog(path)) as catalog:
        catalog.add([replace(record(2), name="mine")])
    command = ["caches", "import", str(place), "--state-dir", str(path.parent)]
    said = "1 imported; 2 were here or have expired; 0 could not be read\n"
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, result.stdout) == (0, said), result.stderr
    assert CliRunner().invoke(app, command).stdout.startswith("0 imported; 3 were here")
    with closing(Catalog(path)) as catalog:
        names = {cache.id: cache.name for cache in catalog.list("anna", 0.0, limit=9)[0]}
    assert names == {"cc_1": "number 1", "cc_2": "mine"}


def test_entries_of_this_version_that_were_changed_are_not_imported(path: Path) -> None:
    source = path.with_name("source.sqlite")
    with closing(Catalog(source)) as catalog:
        catalog.add([record(1)])
    change(source, "UPDATE chunks SET tokens = x'0100000002000000'")
    with closing(Catalog(path)) as catalog:
        assert catalog.import_from(source) == (0, 0, 1)


def test_files_that_are_no_catalog(path: Path, tmp_path: Path) -> None:
    text, other = tmp_path / "text", tmp_path / "other.sqlite"
    text.write_text("no database, and long enough to be none " * 9)
    change(other, "CREATE TABLE songs (title TEXT)")
    with closing(Catalog(path)) as catalog:
        with pytest.raises(StoreError, match="cannot be read"):
            catalog.import_from(text)
        with pytest.raises(StoreError, match="is no catalog"):
            catalog.import_from(other)
    result = CliRunner().invoke(
        app, ["caches", "import", str(tmp_path), "--state-dir", str(path.parent)]
    )
    assert (result.exit_code, "there is no" in result.stderr) == (1, True)
