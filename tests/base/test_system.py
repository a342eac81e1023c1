"""What only some systems have is behind one interface; without it, each does what it says."""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvlinker_fleet
from kvlinker.base import system

PACKAGES = (Path(system.__file__).parents[1], Path(kvlinker_fleet.__file__).parent)
POSIX_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
POSIX_NAMES = {
    *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "chown", "fork", "geteuid", "getgid"),
    *("getloadavg", "getuid", "killpg", "mkfifo", "mlock", "nice", "posix_fadvise"),
    *("posix_fallocate", "preadv", "pwritev", "sched_getaffinity", "sendfile", "setsid", "statvfs"),
}
"""What of ``os`` Windows lacks, or macOS."""

HOMES = {
    "kvlinker.base.system": {
        "fcntl",
        "resource",
        "O_DIRECTORY",
        "O_NOFOLLOW",
        "posix_fallocate",
        "preadv",
    },
    # On Linux alone, where GNU's OpenMP is, or where the system has it.
    "kvlinker.base.threads": {"getloadavg"},
    "kvlinker.base.machine": {"sched_getaffinity"},
    # It says that it needs Linux.
    "kvlinker.quality.bench.harness.measurement": {"posix_fadvise"},
    # Ray Serve's fleets are for Linux.
    "kvlinker_fleet.ray_serve.cluster": {"O_NONBLOCK", "mkfifo"},
}
"""The modules that use what only some systems have, and what that is."""


def used(file: Path) -> set[str]:
    """What a module imports or takes of ``os`` that only some systems have."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names} & POSIX_MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} & POSIX_MODULES
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {node.attr} & POSIX_NAMES if node.value.id == "os" else set()
    return found


def test_modules_that_need_posix_are_known() -> None:
    found = {}
    for package in PACKAGES:
        for file in package.rglob("*.py"):
            if names := used(file):
                found[".".join(file.relative_to(package.parent).with_suffix("").parts)] = names
    assert found == HOMES


HOLDING = """
import sys
from kvlinker.base import system
with open(sys.argv[1]) as file:
    system.lock(file.fileno())
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_another_process_finds_a_lock(tmp_path: Path) -> None:
    place = tmp_path / "lock"
    place.touch()
    command = [sys.executable, "-c", HOLDING, str(place)]
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as holder,
        place.open() as file,
    ):
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        for alone in (True, False):
            with pytest.raises(BlockingIOError):
                system.lock(file.fileno(), alone=alone, wait=False)
        holder.communicate()
        system.lock(file.fileno(), wait=False)
        system.unlock(file.fileno())


def test_a_system_without_locks_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(system, "HAS_LOCKS", False)
    system._warn_of_locks.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            descriptor = system.open_folder(tmp_path)
            system.lock(descriptor, wait=False)
            system.unlock(descriptor)
            os.close(descriptor)
    (record,) = caplog.records
    assert "use each state directory by one process" in record.message
    with pytest.raises(FileNotFoundError):
        system.open_folder(tmp_path / "missing")


def test_a_file_gets_its_length_where_room_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    with (tmp_path / "file").open("wb") as file:
        system.allocate(file.fileno(), 1000)
    assert (tmp_path / "file").stat().st_size == 1000


@pytest.mark.parametrize("together", [True, False])
def test_a_file_is_read_at_any_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, together: bool
) -> None:
    if not together:
        monkeypatch.delattr(os, "preadv")
    (tmp_path / "file").write_bytes(b"0123456789")
    read = bytearray(4)
    with (tmp_path / "file").open("rb") as file:
        assert system.read_at(file.fileno(), memoryview(read), 3) == 4
        assert read == b"3456"
        assert system.read_at(file.fileno(), memoryview(read), 8) == 2
        assert system.read_at(file.fileno(), memoryview(read), 10) == 0
    assert read == b"8956"
