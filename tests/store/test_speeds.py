"""Measured speeds outlive the process; a file that cannot be trusted, or written, is as none."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.store.speeds import STALE_SECONDS, Speeds


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "speeds.json"


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[FakeTimer]:
    made: list[FakeTimer] = []

    def make(seconds: float, function: object) -> FakeTimer:
        made.append(FakeTimer(function))
        return made[-1]

    monkeypatch.setattr("kvlinker.store.speeds.threading.Timer", make)
    return made


class FakeTimer:
    """Runs when the test says so."""

    def __init__(self, function: object) -> None:
        self.fire = function
        self.cancelled = False
        self.daemon = False

    def start(self) -> None:
        assert self.daemon

    def cancel(self) -> None:
        self.cancelled = True


def saved(path: Path, **values: list[float]) -> Speeds:
    speeds = Speeds(path)
    for name, one in values.items():
        speeds.note(name, one)
    assert speeds.save()
    return speeds


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_was_measured_is_there_again(path: Path) -> None:
    saved(path, disk=[5e8], prefill=[1e-4, 0.0])
    again = Speeds(path)
    assert again.of("disk") == (5e8,)
    assert again.of("prefill") == (1e-4, 0.0)
    assert again.of("redis") is None
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_without_a_file_nothing_is_kept() -> None:
    speeds = Speeds()
    speeds.note("disk", [1.0])
    assert speeds.of("disk") == (1.0,)
    assert not speeds.save()
    speeds.close()


def test_closing_saves_once(path: Path) -> None:
    speeds = Speeds(path)
    speeds.close()
    assert not path.exists()
    speeds.note("disk", [1.0])
    speeds.close()
    assert Speeds(path).of("disk") == (1.0,)
    path.unlink()
    speeds.close()
    assert not path.exists()


def test_a_new_speed_is_written_soon(path: Path, timers: list[FakeTimer]) -> None:
    speeds = Speeds(path)
    speeds.note("disk", [1.0])
    speeds.note("redis", [1.0])
    assert len(timers) == 1
    timers[0].fire()  # type: ignore[operator]
    assert Speeds(path).of("redis") == (1.0,)


def test_drift_is_written_and_small_changes_are_not(path: Path, timers: list[FakeTimer]) -> None:
    speeds = saved(path, disk=[100.0])
    timers.clear()
    speeds.note("disk", [120.0])
    assert not timers
    for value in (130.0, 135.0):
        speeds.note("disk", [value])
        assert len(timers) == 1
    timers[0].fire()  # type: ignore[operator]
    assert Speeds(path).of("disk") == (135.0,)
    speeds.note("disk", [10.0])
    assert len(timers) == 2
    speeds.close()
    assert timers[1].cancelled
    assert Speeds(path).of("disk") == (10.0,)


def test_stale_speeds_count_as_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = saved(path, disk=[1.0])
    now = time.time()
    monkeypatch.setattr("kvlinker.store.speeds.time.time", lambda: now + STALE_SECONDS - 10)
    assert Speeds(path).of("disk") == (1.0,)
    monkeypatch.setattr("kvlinker.store.speeds.time.time", lambda: now + STALE_SECONDS + 10)
    assert speeds.of("disk") is None
    assert Speeds(path).of("disk") is None
    speeds.note("disk", [2.0])
    assert speeds.of("disk") == (2.0,)


def test_processes_that_share_the_file_keep_each_others_speeds(path: Path) -> None:
    first, second = Speeds(path), Speeds(path)
    first.note("disk", [1.0])
    second.note("redis", [2.0])
    first.save()
    second.save()
    assert second.of("disk") == (1.0,)
    second.note("disk", [3.0])
    second.save()
    first.save()
    for speeds in (first, second, Speeds(path)):
        assert (speeds.of("disk"), speeds.of("redis")) == ((3.0,), (2.0,))


def change(path: Path, **changes: object) -> None:
    """Change what the file says."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def entry(values: object, at: object = None) -> dict[str, object]:
    return {"disk": {"values": values, "measured_at": time.time() if at is None else at}}


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "not text": lambda path: path.write_bytes(bytes(range(256))),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "other JSON": lambda path: path.write_text("[1, 2]"),
    "foreign": lambda path: change(path, format="something else"),
    "nested": lambda path: path.write_text("[" * 100_000),
    "no speeds": lambda path: change(path, speeds=None),
    "no dict": lambda path: change(path, speeds={"disk": 5}),
    "no list": lambda path: change(path, speeds=entry(5.0)),
    "no numbers": lambda path: change(path, speeds=entry(["fast"])),
    "negative": lambda path: change(path, speeds=entry([-1.0])),
    "endless": lambda path: change(path, speeds=entry([math.inf])),
    "nothing": lambda path: change(path, speeds=entry([0.0])),
    "no time": lambda path: change(path, speeds=entry([1.0], at="yesterday")),
}


def test_a_damaged_file_is_measured_again(
    path: Path, caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    for name, damage in DAMAGES.items():
        with subtests.test(name):
            caplog.clear()
            path.unlink(missing_ok=True)
            saved(path, disk=[123.0])
            damage(path)
            speeds = Speeds(path)
            assert speeds.of("disk") is None
            assert len(complaints(caplog)) == 1
            speeds.note("disk", [5.0])
            assert speeds.save()
            assert Speeds(path).of("disk") == (5.0,)


@given(st.floats(0, 1, exclude_max=True))
def test_whatever_bit_flips_what_is_read_are_speeds(
    tmp_path_factory: pytest.TempPathFactory, place: float
) -> None:
    """A speed that is off is believed until it is measured again."""
    path = tmp_path_factory.mktemp("speeds") / "speeds.json"
    saved(path, disk=[123.5], prefill=[1e-4, 2e-8])
    content = bytearray(path.read_bytes())
    bit = int(place * 8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    read = Speeds(path)
    for values in filter(None, map(read.of, ("disk", "prefill"))):
        assert all(0 <= value < math.inf for value in values)
        assert any(values)


def test_a_file_of_an_earlier_release_is_read(path: Path) -> None:
    saved(path, disk=[123.0])
    change(path, xxh3_128="0123")
    assert Speeds(path).of("disk") == (123.0,)


def test_a_newer_version_is_left_alone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(path, disk=[1.0])
    change(path, version=2)
    before = path.read_bytes()
    speeds = Speeds(path)
    assert speeds.of("disk") is None
    speeds.note("disk", [5.0])
    assert not speeds.save()
    assert speeds.of("disk") == (5.0,)
    assert path.read_bytes() == before
    (complaint,) = complaints(caplog)
    assert "version 2, not 1" in complaint


@pytest.mark.parametrize("what", ["folder", "pipe", "link"])
def test_something_else_in_its_place_is_not_opened(
    what: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        saved(path.with_name("other"), disk=[1.0])
        path.symlink_to("other")
    speeds = Speeds(path)
    assert speeds.of("disk") is None
    speeds.note("disk", [5.0])
    assert speeds.save() == (what != "folder")
    assert len(complaints(caplog)) == 1


def test_where_nothing_can_be_written_it_works_in_memory(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    speeds = Speeds(path / "is" / "missing")
    for _ in range(3):
        speeds.note("disk", [5.0])
        assert not speeds.save()
    speeds.close()
    assert speeds.of("disk") == (5.0,)
    assert len(complaints(caplog)) == 1


def test_what_is_no_speed_is_refused(subtests: pytest.Subtests) -> None:
    for values in ([], [0.0], [-1.0], [math.nan], [math.inf], [1.0, -1.0]):
        with subtests.test(values=values), pytest.raises(ValueError, match="no speeds"):
            Speeds().note("disk", values)
