"""A model's fingerprint is that of its files, which are read once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from kvlinker.engine.model_files import FINGERPRINTS, fingerprint_of_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"hidden_size": 8, "transformers_version": "5"}')
    for part in (1, 2):
        (made / f"model-0000{part}-of-00002.safetensors").write_bytes(bytes([part]) * 1000)
    (made / "consolidated.safetensors").write_bytes(b"the same weights in another form")
    return made


def name_of(folder: Path, dtype: torch.dtype = torch.float32) -> str | None:
    return fingerprint_of_files(folder, dtype, state_dir=folder.parent / "state")


def test_a_copy_has_the_same_name(folder: Path) -> None:
    copy = shutil.copytree(folder, folder.parent / "copy")
    (copy / "config.json").write_text('{"transformers_version": "6", "hidden_size": 8}')
    (copy / "consolidated.safetensors").unlink()
    (copy / "README.md").write_text("more")
    assert name_of(copy) == name_of(folder) != name_of(folder, torch.bfloat16)


@pytest.mark.parametrize("changed", ["config.json", "model-00002-of-00002.safetensors"])
def test_what_changes_the_model_changes_its_name(folder: Path, changed: str) -> None:
    before = name_of(folder)
    (folder / changed).write_bytes((folder / changed).read_bytes().replace(b"8", b"9").replace(b"\2", b"\3"))
    assert name_of(folder) != before


def test_weights_are_read_once_until_size_or_time_changes(folder: Path) -> None:
    before = name_of(folder)
    file = folder / "model-00001-of-00002.safetensors"
    time = file.stat().st_mtime_ns
    file.write_bytes(bytes([7]) * 1000)
    os.utime(file, ns=(time, time))
    assert name_of(folder) == before
    os.utime(file, ns=(time, time + 1))
    assert name_of(folder) != before


@pytest.mark.parametrize("content", ["", "[]", '{"x": 1}'])
def test_a_damaged_memory_is_none(folder: Path, content: str) -> None:
    before = name_of(folder)
    (folder.parent / "state" / FINGERPRINTS).write_text(content)
    assert name_of(folder) == before


def test_folders_without_weights_have_no_name(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert name_of(folder) is None
