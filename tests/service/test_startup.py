import subprocess
import sys
from pathlib import Path

import pytest

from kvlinker.base.events import Events
from kvlinker.service.startup import engine_source
from kvlinker.service.state import open_state
from kvlinker.settings import load_settings
from kvlinker.store import StoreError


def test_a_store_that_cannot_be_opened_leaves_no_catalog_open(tmp_path: Path) -> None:
    (tmp_path / "chunks").write_text("not a directory")
    settings = load_settings(state_dir=str(tmp_path))
    with pytest.raises(StoreError):
        open_state(settings, Events(), host_bytes=0)
    assert (tmp_path / "catalog.sqlite").exists()
    assert not (tmp_path / "catalog.sqlite-wal").exists()


def test_an_unusable_catalog_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "catalog.sqlite").write_text("not a database")
    settings = load_settings(state_dir=str(tmp_path), model=str(tmp_path / "no model"))
    with pytest.raises(StoreError, match=r"catalog\.sqlite"):
        engine_source(settings)


def test_commands_that_read_caches_import_no_engine() -> None:
    program = "import sys, kvlinker.service.state; print(*(n for n in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "kvlinker.store" in loaded
    assert not {"transformers", "kvlinker.engines.embedded"} & loaded
