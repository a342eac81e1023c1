"""A lane's copies follow what was computed before them, go before what waits for them, and keep
what they read and write: on streams that note what they are given."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvlinker.store.chunk_kv import LayerKV
from kvlinker.store.memory.lane import CopyLane, lane_to
from tests.store.memory.fake_device import FakeDevice

CUDA = torch.device("cuda", 0)


class Stream:
    """Notes what it is given, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.given: list[str] = []
        self.passed = False

    def wait_stream(self, other: Stream) -> None:
        self.given.append(f"wait for {other.name}")

    def record_event(self) -> Event:
        self.given.append("event")
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.given.append(f"wait for an event of {event.stream.name}")


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.synchronized = False

    def query(self) -> bool:
        return self.stream.passed

    def synchronize(self) -> None:
        self.synchronized = True


class Streams:
    """Two streams in place of CUDA's, and what is current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computing, self.copying = Stream("computing"), Stream("copying")
        self.current = self.computing
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.copying)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._entered)

    @contextmanager
    def _entered(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def copy(self) -> None:
        self.current.given.append("copy")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_copies_come_behind_what_was_computed_and_before_what_waits_for_them(
    streams: Streams,
) -> None:
    arrival = CopyLane(CUDA).launch(streams.copy, keeping=())
    assert streams.copying.given == ["wait for computing", "copy", "event"]
    assert streams.computing.given == []
    arrival.wait()
    assert streams.computing.given == ["wait for an event of copying"]


def test_what_copies_read_and_write_is_kept_until_they_are_made(streams: Streams) -> None:
    lane, source = CopyLane(CUDA), torch.zeros(3)
    kept = weakref.ref(source)
    lane.launch(streams.copy, keeping=[source])
    del source
    lane.launch(streams.copy, keeping=())
    gc.collect()
    assert kept() is not None
    streams.copying.passed = True
    lane.launch(streams.copy, keeping=())
    gc.collect()
    assert kept() is None


def test_what_was_launched_before_an_error_is_kept_too(streams: Streams) -> None:
    lane, source = CopyLane(CUDA), torch.zeros(3)
    kept = weakref.ref(source)

    def fail() -> None:
        streams.copy()
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        lane.launch(fail, keeping=[source])
    del source
    gc.collect()
    assert kept() is not None


def test_only_devices_with_memory_of_their_own_have_lanes(streams: Streams) -> None:
    assert lane_to(torch.device("cpu")) is None
    assert isinstance(lane_to(CUDA), CopyLane)


@pytest.mark.parametrize("joined", [False, True])
def test_layers_are_on_the_device_once_somebody_has_waited(joined: bool) -> None:
    tensors: list[Any] = [torch.randn(2, 5, 4), torch.randn(2, 5, 6)]
    layer = LayerKV(*tensors)
    if joined:
        layer = LayerKV.of_joined(torch.cat(tensors, dim=-1), 4)
    device = FakeDevice()
    (copy,), arrival = device.copies([layer])
    assert copy.key.isnan().all()
    arrival.wait()
    assert torch.equal(copy.key, tensors[0])
    assert torch.equal(copy.value, tensors[1])
    assert copy.is_joined == joined
    assert device.holds(copy.key)
    assert not device.holds(layer.key)
