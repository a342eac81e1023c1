"""Files appear whole, last through a power cut, and leave nothing beside them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvlinker.store.format.durability import create_file, replace_file, write_beside
from tests.store.store_chunks import run_threads


def test_a_file_is_replaced_once_the_disk_has_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(b"old")
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        steps.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "content")
        fsync(descriptor)

    def noted_replace(source: Any, target: Any) -> None:
        assert path.read_bytes() == b"old"
        assert Path(source).read_bytes() == b"new"
        steps.append("name")
        replace(source, target)

    with mock.patch("os.fsync", noted_fsync), mock.patch("os.replace", noted_replace):
        replace_file(path, b"new")
    assert steps == ["content", "name", "folder"]
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_what_fails_leaves_the_old_file_alone(tmp_path: Path, step: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with (
        mock.patch(f"os.{step}", side_effect=OSError("full")),
        pytest.raises(OSError, match="full"),
    ):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_is_broken_off_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_beside(tmp_path / "file", mock.Mock(side_effect=KeyboardInterrupt))
    assert list(tmp_path.iterdir()) == []


def test_one_of_many_creates_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    created: list[bytes] = []

    def create(content: bytes) -> None:
        if create_file(path, content):
            created.append(content)

    run_threads(*(lambda number=number: create(bytes([number]) * 9) for number in range(8)))
    assert [path.read_bytes()] == created
    assert list(tmp_path.iterdir()) == [path]
