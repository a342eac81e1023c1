"""Both tiers against one model of a least-recently-used cache with a budget, the disk tier over
restarts too."""

from __future__ import annotations

import shutil
import tempfile
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvlinker.base.events import ChunkEvicted
from kvlinker.store import DiskTier, HostTier, Tier
from kvlinker.store.format.chunk_file import encode_chunk
from kvlinker.store.remote.objects import object_tier
from tests.properties import examples
from tests.store.store_chunks import Recorder, chunk_kv, key_of, same_kv

NUMBERS = st.integers(0, 5)
KV = {number: chunk_kv(number, tokens=2 * number + 1) for number in range(6)}  # 80 to 880 bytes


class TierMachine(RuleBasedStateMachine):
    """Any sequence of calls leaves the tier as the model, in content, order, accounting and
    events."""

    tier: Tier

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()
        self.model: OrderedDict[int, int] = (
            OrderedDict()
        )  # number -> bytes, least recently used first
        self.evicted: list[int] = []

    def size(self, number: int) -> int:
        return KV[number].nbytes

    @rule(number=NUMBERS)
    def put(self, number: int) -> None:
        stored = self.tier.put(key_of(number), KV[number])
        size = self.size(number)
        assert stored == (number in self.model or size <= self.tier.budget_bytes)
        if number in self.model:
            self.model.move_to_end(number)
        elif stored:
            while sum(self.model.values()) + size > self.tier.budget_bytes:
                self.evicted.append(self.model.popitem(last=False)[1])
            self.model[number] = size

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        kv = self.tier.get(key_of(number))
        assert (kv is not None) == (number in self.model)
        if kv is not None:
            assert same_kv(kv, KV[number])
            self.model.move_to_end(number)

    @rule(number=NUMBERS)
    def delete(self, number: int) -> None:
        self.tier.delete(key_of(number))
        self.model.pop(number, None)

    @rule(number=NUMBERS)
    def look(self, number: int) -> None:
        assert self.tier.contains(key_of(number)) == (number in self.model)
        assert self.tier.nbytes(key_of(number)) == self.model.get(number)

    @rule()
    def check(self) -> None:
        result = self.tier.check()
        assert (result.checked, result.damaged) == (len(self.model), ())

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert self.tier.keys() == tuple(key_of(number) for number in self.model)
        assert len(self.tier) == len(self.model)
        assert self.tier.sizes(map(key_of, range(-1, 6))) == {
            key_of(number): size for number, size in self.model.items()
        }
        assert self.tier.used_bytes == sum(self.model.values()) <= self.tier.budget_bytes
        assert [event.nbytes for event in self.recorder.of(ChunkEvicted)] == self.evicted


class HostMachine(TierMachine):
    @initialize(budget=st.integers(0, 2500))
    def open(self, budget: int) -> None:
        self.tier = HostTier(budget, self.recorder.events)


class DiskMachine(TierMachine):
    @initialize(budget=st.integers(0, 9000))
    def open(self, budget: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.fsync = mock.patch("os.fsync")  # the disk's own speed is not the subject
        self.fsync.start()
        self.tier = DiskTier(self.folder, budget, self.recorder.events)

    def size(self, number: int) -> int:
        return encode_chunk(key_of(number), KV[number]).nbytes

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.tier = DiskTier(self.folder, self.tier.budget_bytes, self.recorder.events)

    @precondition(lambda self: self.model)
    @rule()
    def restart_with_half_the_budget(self) -> None:
        budget = self.tier.budget_bytes // 2
        self.tier = DiskTier(self.folder, budget, self.recorder.events)
        while sum(self.model.values()) > budget:
            self.evicted.append(self.model.popitem(last=False)[1])

    @invariant()
    def files_are_what_is_counted(self) -> None:
        if hasattr(self, "tier"):
            sizes = {
                path.stem: path.stat().st_size for path in self.folder.rglob("*") if path.is_file()
            }
            assert sizes == {key_of(number): size for number, size in self.model.items()}

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.fsync.stop()
            shutil.rmtree(self.folder)


TestHostTier = HostMachine.TestCase
TestHostTier.settings = examples(60, stateful_step_count=30, deadline=None)
TestDiskTier = DiskMachine.TestCase
TestDiskTier.settings = examples(50, stateful_step_count=30, deadline=None)


@pytest.fixture(params=["host", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    events = Recorder().events
    return (
        HostTier(1 << 20, events)
        if request.param == "host"
        else DiskTier(tmp_path, 1 << 20, events)
    )


def test_getting_and_putting_again_are_uses_and_looking_is_not(tier: Tier) -> None:
    one, two, three = (key_of(number) for number in (1, 2, 3))
    for number in (1, 2, 3):
        tier.put(key_of(number), KV[number])
    tier.get(one)
    assert tier.keys() == (two, three, one)
    tier.put(two, KV[2])
    assert tier.keys() == (three, one, two)
    tier.contains(three)
    tier.nbytes(three)
    tier.check()
    assert tier.keys() == (three, one, two)


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    events = Recorder().events
    tier = DiskTier(tmp_path, 1 << 20, events)
    with mock.patch("os.fsync"):
        tier.put(key_of(0), KV[0])
        for number in range(1, 6):
            tier.get(key_of(number - 1))
            tier.put(key_of(number), KV[number])
        tier.get(key_of(2))
    expected = tuple(key_of(number) for number in (0, 1, 3, 4, 5, 2))
    assert tier.keys() == expected
    assert DiskTier(tmp_path, 1 << 20, events).keys() == expected


@pytest.mark.parametrize("kind", ["disk", "object"])
def test_a_check_has_few_chunks_in_memory_at_a_time(tmp_path: Path, kind: str) -> None:
    """A tier may hold more than memory does."""
    events = Recorder().events
    tier = (
        DiskTier(tmp_path, 1 << 30, events)
        if kind == "disk"
        else object_tier(f"file://{tmp_path}", 1 << 30, events)
    )
    kv = chunk_kv(1, tokens=10_000)
    for number in range(12):
        tier.put(key_of(number), kv)
    tracemalloc.start()  # which NumPy tells of its memory
    try:
        assert tier.check().checked == 12
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kv.nbytes < peak < 5 * kv.nbytes


def test_a_budget_can_be_used_to_the_last_byte() -> None:
    recorder = Recorder()
    tier = HostTier(KV[1].nbytes + KV[2].nbytes, recorder.events)
    tier.put(key_of(1), KV[1])
    tier.put(key_of(2), KV[2])
    assert recorder.of(ChunkEvicted) == []
    assert tier.used_bytes == tier.budget_bytes


def test_the_host_keeps_the_very_tensors() -> None:
    tier = HostTier(1000, Recorder().events)
    kv = chunk_kv(1)
    tier.put(key_of(1), kv)
    assert tier.get(key_of(1)) is kv


def test_a_closed_host_tier_holds_nothing() -> None:
    tier = HostTier(1000, Recorder().events)
    tier.put(key_of(1), chunk_kv(1))
    tier.close()
    tier.close()
    assert (tier.get(key_of(1)), tier.used_bytes, len(tier)) == (None, 0, 0)


def test_a_negative_budget_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="negative"):
        HostTier(-1, Recorder().events)
