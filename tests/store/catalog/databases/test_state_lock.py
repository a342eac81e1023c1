"""Many processes use a state directory at once; what changes its key has it alone."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kvlinker.store import Catalog, StoreError
from kvlinker.store.catalog.databases import state_lock
from kvlinker.store.catalog.databases.state_lock import DirectoryLock
from kvlinker.store.format.encryption import Cipher
from tests.store.store_chunks import run_threads

KEY = bytes(32)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_lock, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr("kvlinker.store.catalog.encryption.PATIENCE_SECONDS", 0.2)


def test_shared_or_alone(tmp_path: Path) -> None:
    first, second, third = (DirectoryLock(tmp_path) for _ in range(3))
    first.share()
    second.share()
    with pytest.raises(StoreError, match="in use by a server"):
        third.take_alone()
    second.close()
    second.close()
    first.close()
    third.take_alone()
    fourth = DirectoryLock(tmp_path)
    with pytest.raises(StoreError, match="encrypted anew"):
        fourth.share()
    third.share()
    fourth.share()
    third.close()
    fourth.close()


def test_a_folder_that_cannot_be_locked(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(StoreError, match="cannot be locked"):
        DirectoryLock(tmp_path)
    with pytest.raises(StoreError, match="cannot be locked"):
        Catalog(tmp_path / "catalog.sqlite")


def test_a_first_key_waits_for_those_who_have_none(tmp_path: Path) -> None:
    """They would go on without it."""
    pytest.importorskip("cryptography")
    path = tmp_path / "catalog.sqlite"
    with closing(Catalog(path)), pytest.raises(StoreError, match="in use"):
        Catalog(path, Cipher(KEY))
    with (
        closing(Catalog(path, Cipher(KEY))),
        closing(Catalog(path, Cipher(KEY))),
        pytest.raises(StoreError, match="is encrypted"),
    ):
        Catalog(path)


def test_many_start_at_once_on_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setattr("kvlinker.store.catalog.encryption.PATIENCE_SECONDS", 10.0)
    path = tmp_path / "catalog.sqlite"
    opened: list[Catalog] = []
    run_threads(*[lambda: opened.append(Catalog(path, Cipher(KEY)))] * 8)
    assert len(opened) == 8
    for catalog in opened:
        catalog.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM encryption").fetchone() == (1,)
