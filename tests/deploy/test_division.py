"""How the tests are divided among processes and shards, and that the core keeps to its budget."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import conftest

ROOT = Path(conftest.__file__).parent
FILES = sorted(
    file for folder in ("tests", "lab/tests") for file in (ROOT / folder).rglob("test_*.py")
)


@given(st.integers(1, 30))
def test_each_file_is_in_one_part(parts: int) -> None:
    seconds = {file.relative_to(ROOT).as_posix(): float(len(file.name) ** 2) for file in FILES[::2]}
    shares = conftest.divide(FILES, seconds, parts)
    assert len(shares) == parts
    assert sorted(file for share in shares for file in share) == FILES


def test_parts_take_alike() -> None:
    """No part exceeds another by more than the longest of its own units."""
    seconds = {f"tests/test_{number}.py": 1.0 + number % 7 for number in range(40)}
    files = [ROOT / name for name in seconds]
    sums = [
        sum(seconds[file.relative_to(ROOT).as_posix()] for file in share)
        for share in conftest.divide(files, seconds, 3)
    ]
    assert max(sums) - min(sums) <= 7


def test_files_without_tests_are_divided_too() -> None:
    """They are imported all the same."""
    seconds = {file.relative_to(ROOT).as_posix(): 0.0 for file in FILES}
    sizes = [len(share) for share in conftest.divide(FILES, seconds, 3)]
    assert max(sizes) - min(sizes) <= 15


def test_folders_that_share_what_is_dear_stay_together() -> None:
    for share in conftest.divide(FILES, {}, 5):
        for folder in conftest.TOGETHER:
            inside = [file for file in FILES if file.is_relative_to(ROOT / folder)]
            assert set(share).isdisjoint(inside) or set(share).issuperset(inside)


@pytest.mark.whole
def test_workers_run_each_test_once() -> None:
    """And a session over its budget fails, and names what took longest."""
    arguments = ("-v", "-n", "2", "--dist", "each", "--budget", "0.001", "tests/base/types")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 1, ended.stdout
    passed = re.findall(r"(?<!SUB)PASSED (tests/.+?) *$", ended.stdout, re.MULTILINE)
    files = {test.partition("::")[0] for test in passed}
    assert files == {f"tests/base/types/{file.name}" for file in FILES if "types" in file.parts}
    assert len(passed) == len(set(passed))
    assert "of a budget of 0 s" in ended.stdout
    named = re.findall(r" s  (tests/.+)", ended.stdout)
    assert len(named) == min(len(passed), conftest.DEAREST)
    assert set(named) <= set(passed)
