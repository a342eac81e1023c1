from pathlib import Path

import pytest

from kvlinker.base.events import Events
from kvlinker.service.startup import open_state
from kvlinker.settings import load_settings
from kvlinker.store import StoreError


def test_a_store_that_cannot_be_opened_leaves_no_catalog_open(tmp_path: Path) -> None:
    (tmp_path / "chunks").write_text("not a directory")
    settings = load_settings(state_dir=str(tmp_path))
    with pytest.raises(StoreError):
        open_state(settings, Events(), host_bytes=0)
    assert (tmp_path / "catalog.sqlite").exists()
    assert not (tmp_path / "catalog.sqlite-wal").exists()
