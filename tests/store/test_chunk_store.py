"""The chunk store: visible at once, written behind, promoted on use, and deleted for good."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlinker.base.events import ChunkDamaged, ChunkEvicted, ChunkLoaded, ChunkLookup
from kvlinker.base.types.chunk_scores import ChunkScores, Contextualization
from kvlinker.base.types.chunks import Eviction
from kvlinker.store import (
    ChunkStore,
    DeviceTier,
    DiskTier,
    HostTier,
    LayerKV,
    TierUsage,
    open_store,
)
from kvlinker.store.chunk_kv import ResidentForm, changed
from kvlinker.store.format.chunk_file import encode_chunk
from kvlinker.store.loading.prompt_load import Urgency
from kvlinker.store.memory.resident import Residence
from kvlinker.store.tiers.base import lacks_scores
from tests.properties import examples
from tests.store.gated_tier import TIMEOUT, GatedTier
from tests.store.store_chunks import Recorder, chunk_kv, key_of, run_threads, same_kv, sized
from tests.waiting import wait_until

SIZE = chunk_kv(0).nbytes
FILE_SIZE = encode_chunk(key_of(0), chunk_kv(0)).nbytes
PLENTY = 1 << 20


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def slow(recorder: Recorder) -> Iterator[GatedTier]:
    tier = GatedTier(PLENTY, recorder.events)
    yield tier
    tier.put_gate.open()


def two_tiers(
    recorder: Recorder, slow: GatedTier, host_bytes: int = PLENTY, **options: Any
) -> ChunkStore:
    return ChunkStore([HostTier(host_bytes, recorder.events), slow], recorder.events, **options)


def holds(store: ChunkStore, number: int) -> bool:
    """Whether ``get`` finds the chunk, and all other queries agree; what is found is right."""
    key = key_of(number)
    keys = store.keys()
    known = (store.tier_of(key) is not None, store.nbytes(key) is not None, key in keys)
    kv = store.get(key)
    assert set(known) == {kv is not None}
    assert kv is None or same_kv(kv, chunk_kv(number))
    return kv is not None


class Negated(ResidentForm):
    """A resident form in which keys have the opposite sign."""

    def resident(self, index: int, layer: LayerKV) -> LayerKV:
        return LayerKV(-layer.key, layer.value)

    def computed(self, index: int, layer: LayerKV) -> LayerKV:
        return LayerKV(-layer.key, layer.value)


def test_memory_has_the_resident_form_and_slower_tiers_what_was_computed(
    recorder: Recorder,
) -> None:
    host, slower, slowest = (
        HostTier(PLENTY, recorder.events, name=name) for name in ("host", "slower", "slowest")
    )
    store = ChunkStore([host, slower, slowest], recorder.events)
    form = Negated()
    store.keep_resident_as(Residence(form))
    key, computed = key_of(1), chunk_kv(1)
    expected = changed(computed, form.resident)

    def check() -> None:
        store.flush()
        assert all(
            same_kv(found, computed)
            for tier in (slower, slowest)
            if (found := tier.get(key)) is not None
        )
        for kv in (store.get(key), store.get_resident(key), host.get(key)):
            assert kv is not None
            assert same_kv(kv, expected)
        back = store.get_computed(key)
        assert back is not None
        assert same_kv(back, computed)

    assert same_kv(store.put(key, computed), expected)
    check()
    for lost in (slowest, host):
        lost.delete(key)
        store.get(key)
        check()
    host.delete(key)
    slowest.delete(key)
    (future,) = store.load([key], Urgency())
    loaded = future.result(timeout=TIMEOUT)
    assert loaded is not None
    for index, layer in enumerate(expected.layers):
        found = loaded.layer(index)
        assert found is not None
        assert torch.equal(found.key, layer.key)
    wait_until(lambda: host.contains(key))  # it begins before it is kept
    check()
    store.close()


def test_held_chunks_stay_in_memory(recorder: Recorder, slow: GatedTier) -> None:
    store = two_tiers(recorder, slow, host_bytes=2 * SIZE)
    hold = store.hold({key_of(1): SIZE, key_of(2): SIZE})
    assert hold is not None
    assert store.held_bytes == 2 * SIZE
    assert store.hold({key_of(3): SIZE}) is None
    slow.put_gate.open()
    for number in range(1, 6):
        store.put(key_of(number), chunk_kv(number))
    assert store.tier_of(key_of(1)) == store.tier_of(key_of(2)) == "host"
    store.flush()
    assert store.tier_of(key_of(5)) != "host"
    hold.release()
    assert store.hold({key_of(3): SIZE}) is not None
    for number in range(3, 6):
        assert store.get(key_of(number)) is not None
    assert {store.tier_of(key_of(number)) for number in (1, 2)} != {"host"}
    store.close()


class StoreMachine(RuleBasedStateMachine):
    """Small tiers, with writes to the slower one held up: what must be visible is, what was deleted
    is not."""

    KEYS = st.integers(0, 7)

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()
        self.host = HostTier(2 * SIZE, self.recorder.events)
        self.slow = GatedTier(4 * SIZE, self.recorder.events)
        self.store = ChunkStore(
            [self.host, self.slow],
            self.recorder.events,
            device=self.device(),
            write_queue_bytes=3 * SIZE,
        )
        self.waiting: list[int] = []  # queued or being written, in order
        self.absent = set(range(8))  # never put, or deleted since

    def device(self) -> DeviceTier | None:
        return None

    @rule(number=KEYS)
    def put(self, number: int) -> None:
        self.store.put(key_of(number), chunk_kv(number))
        self.absent.discard(number)
        if number not in self.waiting and len(self.waiting) < 3:
            self.waiting.append(number)
        assert holds(self.store, number)

    @rule(number=KEYS)
    def get(self, number: int) -> None:
        was_held = self.host.contains(key_of(number)) or self.slow.contains(key_of(number))
        assert holds(self.store, number) or not (was_held or number in self.waiting)

    @precondition(lambda self: self.waiting)
    @rule()
    def finish_one_write(self) -> None:
        self.slow.put_gate.let_one_through()
        assert self.slow.finished_puts.acquire(timeout=TIMEOUT)
        written = self.waiting.pop(0)
        assert self.slow.contains(key_of(written))
        if not self.waiting:
            self.store.flush()

    @rule(number=KEYS)
    def delete(self, number: int) -> None:
        if self.waiting[:1] == [
            number
        ]:  # the writer is at the gate with it, and delete waits for the writer
            self.finish_one_write()
        self.store.delete(key_of(number))
        self.absent.add(number)
        if number in self.waiting:
            self.waiting.remove(number)

    @invariant()
    def promises_hold(self) -> None:
        for tier in (self.host, self.slow):
            assert tier.used_bytes == SIZE * len(tier) <= tier.budget_bytes
        for number in self.absent:
            assert not holds(self.store, number)
        for number in self.waiting:
            assert self.store.tier_of(key_of(number)) in ("device", "host")

    def teardown(self) -> None:
        self.slow.put_gate.open()
        self.store.close()
        assert {key_of(number) for number in self.absent}.isdisjoint(self.slow.keys())
        lookups = self.recorder.of(ChunkLookup)
        assert sum(lookup.hit for lookup in lookups) == len(self.recorder.of(ChunkLoaded))


class DeviceMachine(StoreMachine):
    """The same, with room for one chunk on a device."""

    def device(self) -> DeviceTier:
        return DeviceTier(SIZE, torch.device("cpu"), self.recorder.events)


TestChunkStore = StoreMachine.TestCase
TestChunkStore.settings = examples(60, stateful_step_count=30, deadline=None)
TestWithDevice = DeviceMachine.TestCase
TestWithDevice.settings = examples(40, stateful_step_count=30, deadline=None)


def test_each_lookup_is_told_once(recorder: Recorder, slow: GatedTier) -> None:
    store = two_tiers(recorder, slow)
    slow.put_gate.open()
    slow.put(key_of(2), chunk_kv(2))
    store.put(key_of(1), chunk_kv(1))
    for number in (1, 2, 2, 3):
        store.get(key_of(number))
    assert [(event.hit, event.tier) for event in recorder.of(ChunkLookup)] == [
        (True, "host"),
        (True, "slow"),
        (True, "host"),
        (False, "none"),
    ]
    assert [(event.tier, event.nbytes) for event in recorder.of(ChunkLoaded)] == [
        ("host", SIZE),
        ("slow", SIZE),
        ("host", SIZE),
    ]
    assert all(0 <= event.seconds < TIMEOUT for event in recorder.of(ChunkLoaded))


def test_put_does_not_wait_and_is_visible_until_it_is_written(
    recorder: Recorder, slow: GatedTier
) -> None:
    store = two_tiers(recorder, slow, host_bytes=0)
    store.put(key_of(1), chunk_kv(1))
    slow.put_gate.wait_for_a_caller()
    assert holds(store, 1)
    assert store.tier_of(key_of(1)) == "host"
    assert recorder.of(ChunkLookup) == [ChunkLookup(hit=True, tier="host")]
    slow.put_gate.let_one_through()
    store.flush()
    assert store.tier_of(key_of(1)) == "slow"
    assert holds(store, 1)


def test_a_chunk_that_waits_to_be_written_returns_to_the_host_on_use(
    recorder: Recorder, slow: GatedTier
) -> None:
    store = two_tiers(recorder, slow, host_bytes=SIZE)
    store.put(key_of(1), chunk_kv(1))
    store.put(key_of(2), chunk_kv(2))
    assert recorder.of(ChunkEvicted) == [ChunkEvicted("host", SIZE)]
    store.get(key_of(1))
    slow.put_gate.open()
    store.flush()
    assert store.tier_of(key_of(1)) == "host"
    assert store.tier_of(key_of(2)) == "slow"


def test_a_full_queue_keeps_new_chunks_in_the_first_tier_only(
    recorder: Recorder, slow: GatedTier, caplog: pytest.LogCaptureFixture
) -> None:
    store = two_tiers(recorder, slow, write_queue_bytes=2 * SIZE)
    for number in range(3):
        store.put(key_of(number), chunk_kv(number))
    assert caplog.messages == [
        f"Chunk {key_of(2)} stays out of the slower tier slow: too many writes wait already"
    ]
    assert all(holds(store, number) for number in range(3))
    slow.put_gate.open()
    store.flush()
    assert slow.keys() == (key_of(0), key_of(1))
    store.put(key_of(2), chunk_kv(2))
    store.flush()
    assert slow.keys() == (key_of(0), key_of(1), key_of(2))


def test_a_chunk_larger_than_the_queue_is_written_when_nothing_else_waits(
    recorder: Recorder, slow: GatedTier
) -> None:
    store = two_tiers(recorder, slow, write_queue_bytes=1)
    slow.put_gate.open()
    store.put(key_of(1), chunk_kv(1))
    store.flush()
    assert slow.contains(key_of(1))


@pytest.mark.parametrize("begun", [True, False])
def test_a_delete_overtakes_the_write(recorder: Recorder, slow: GatedTier, begun: bool) -> None:
    store = two_tiers(recorder, slow)
    number = 1 if begun else 2
    store.put(key_of(1), chunk_kv(1))
    store.put(key_of(2), chunk_kv(2))
    slow.put_gate.wait_for_a_caller()
    deleter = threading.Thread(target=store.delete, args=(key_of(number),))
    deleter.start()
    if begun:
        deleter.join(timeout=0.05)
        assert deleter.is_alive(), "it waits for the write, to remove what that leaves"
    else:
        deleter.join(timeout=TIMEOUT)
        assert not holds(store, number)
    slow.put_gate.open()
    deleter.join(timeout=TIMEOUT)
    store.flush()
    assert not holds(store, number)
    assert holds(store, 3 - number)


def test_a_put_that_follows_a_delete_is_written_in_its_turn(
    recorder: Recorder, slow: GatedTier
) -> None:
    store = two_tiers(recorder, slow, host_bytes=0)
    store.put(key_of(1), chunk_kv(1))
    slow.put_gate.wait_for_a_caller()
    deleter = threading.Thread(target=store.delete, args=(key_of(1),))
    deleter.start()
    wait_until(lambda: store.tier_of(key_of(1)) is None)
    assert not holds(store, 1)
    store.put(key_of(1), chunk_kv(1))
    slow.put_gate.let_one_through()
    slow.put_gate.wait_for_a_caller()
    assert holds(store, 1)
    slow.put_gate.open()
    deleter.join(timeout=TIMEOUT)
    store.close()


@pytest.mark.parametrize("begins", ["before", "during"])
@pytest.mark.parametrize("ends", ["during", "after"])
def test_a_load_does_not_undo_a_delete(
    recorder: Recorder, slow: GatedTier, begins: str, ends: str
) -> None:
    """A get reads the slow tier's copy, and would promote it, while that chunk is deleted."""
    store = two_tiers(recorder, slow)
    slow.put_gate.open()
    slow.put(key_of(1), chunk_kv(1))
    slow.get_gate.close()
    reader = threading.Thread(target=store.get, args=(key_of(1),))

    def begin_load() -> None:
        reader.start()
        slow.get_gate.wait_for_a_caller()

    def end_load() -> None:
        slow.get_gate.open()
        reader.join(timeout=TIMEOUT)

    delete = slow.delete

    def delete_meanwhile(key: str) -> None:
        if begins == "during":
            begin_load()
        if ends == "during":
            end_load()
        delete(key)

    if begins == "before":
        begin_load()
    with mock.patch.object(slow, "delete", delete_meanwhile):
        store.delete(key_of(1))
    if ends == "after":
        end_load()
    assert [event.hit for event in recorder.of(ChunkLookup)] == [True]
    assert not holds(store, 1)


def test_promotion_reaches_every_faster_tier(recorder: Recorder, slow: GatedTier) -> None:
    first, second = (HostTier(PLENTY, recorder.events, name=name) for name in ("first", "second"))
    store = ChunkStore([first, second, slow], recorder.events)
    slow.put_gate.open()
    slow.put(key_of(1), chunk_kv(1))
    assert store.get(key_of(1)) is not None
    assert first.contains(key_of(1))
    store.flush()
    assert second.contains(key_of(1))


def test_uses_count_in_every_tier_of_its_own(tmp_path: Path, recorder: Recorder) -> None:
    gone_first: dict[Eviction, int] = {"lru": 0, "reuse": 1}
    for eviction, gone in gone_first.items():
        host = HostTier(2 * SIZE, recorder.events, eviction=eviction)
        disk = DiskTier(tmp_path / eviction, 2 * FILE_SIZE, recorder.events, eviction=eviction)
        store = ChunkStore([host, disk], recorder.events)
        for number, recomputed in ((0, 0.1), (1, 0.9)):
            store.put(key_of(number), chunk_kv(number))
            store.flush()
            store.note_use(key_of(number), recomputed)
        store.note_use(key_of(9), 0.5)
        store.put(key_of(2), chunk_kv(2))
        store.flush()
        for tier in (host, disk):
            assert {key_of(number) for number in range(3)} - set(tier.keys()) == {key_of(gone)}
        store.close()


def test_usage_tells_which_tier_does_not_answer(recorder: Recorder) -> None:
    silent = HostTier(PLENTY, recorder.events, name="silent")
    store = ChunkStore([HostTier(PLENTY, recorder.events), silent], recorder.events)
    for number in (1, 2):
        store.put(key_of(number), chunk_kv(number))
    with mock.patch.object(silent, "sizes", return_value=None):
        usages = store.usage_of({key_of(1), key_of(3)})
    assert usages == (
        TierUsage("host", SIZE, PLENTY, 1),
        TierUsage("silent", 0, PLENTY, 0, reachable=False),
    )


def test_one_tier_is_enough(recorder: Recorder) -> None:
    store = ChunkStore([HostTier(PLENTY, recorder.events)], recorder.events)
    store.put(key_of(1), chunk_kv(1))
    store.flush()
    assert holds(store, 1)
    store.delete(key_of(1))
    assert not holds(store, 1)
    with pytest.raises(ValueError, match="at least one tier"):
        ChunkStore([], recorder.events)


def test_a_tier_that_fails_does_not_stop_the_writer(recorder: Recorder, slow: GatedTier) -> None:
    store = two_tiers(recorder, slow)
    slow.put_gate.open()
    with mock.patch.object(slow, "put", side_effect=RuntimeError("a bug")):
        store.put(key_of(1), chunk_kv(1))
        store.flush()
    store.put(key_of(2), chunk_kv(2))
    store.flush()
    assert slow.keys() == (key_of(2),)
    assert holds(store, 1)


def test_close_writes_what_waits_and_later_puts_are_harmless(
    recorder: Recorder, slow: GatedTier
) -> None:
    store = two_tiers(recorder, slow)
    for number in range(4):
        store.put(key_of(number), chunk_kv(number))
    closer = threading.Thread(target=store.close)
    closer.start()
    slow.put_gate.open()
    closer.join(timeout=TIMEOUT)
    assert not closer.is_alive()
    store.close()
    store.put(key_of(5), chunk_kv(5))
    store.flush()
    assert slow.keys() == tuple(key_of(number) for number in range(4))


def test_a_store_on_disk_survives_a_restart_and_heals(tmp_path: Path, recorder: Recorder) -> None:
    store = open_store(sized(tmp_path, PLENTY, PLENTY), recorder.events)
    for number in range(3):
        store.put(key_of(number), chunk_kv(number))
    store.flush()
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert store.usage() == (
        TierUsage("host", 3 * SIZE, PLENTY, 3),
        TierUsage("disk", on_disk, PLENTY, 3),
    )
    store.close()

    store = open_store(sized(tmp_path, PLENTY, PLENTY), recorder.events)
    damaged, gone = (next(tmp_path.rglob(f"{key_of(number)}.safetensors")) for number in (0, 1))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    host, disk = store.check()
    assert (host.name, host.checked, disk.name, disk.checked) == ("host", 0, "disk", 3)
    assert [damage.key for damage in disk.damaged] == [key_of(0)]
    gone.unlink()
    assert store.get(key_of(1)) is None
    assert [event.key for event in recorder.of(ChunkDamaged)] == [key_of(0)], (
        "what others removed is no damage"
    )
    assert holds(store, 2)
    assert store.tier_of(key_of(2)) == "host"
    store.put(key_of(1), chunk_kv(1))
    store.close()
    assert gone.exists()


def test_a_budget_of_zero_means_no_disk(tmp_path: Path, recorder: Recorder) -> None:
    store = open_store(sized(tmp_path / "store", PLENTY, 0), recorder.events)
    assert [usage.name for usage in store.usage()] == ["host"]
    assert not (tmp_path / "store").exists()


def test_threads_meet_without_harm(tmp_path: Path, recorder: Recorder) -> None:
    host = HostTier(3 * SIZE, recorder.events)
    disk = DiskTier(tmp_path, PLENTY, recorder.events)
    store = ChunkStore([host, disk], recorder.events)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(200):
            number = rng.randrange(8)
            action = rng.choice(("put", "get", "get", "delete", "ask"))
            if action == "put":
                store.put(key_of(number), chunk_kv(number))
            elif action == "delete":
                store.delete(key_of(number))
            elif action == "ask":
                assert store.tier_of(key_of(number)) in ("host", "disk", None)
                assert all(usage.used_bytes <= usage.budget_bytes for usage in store.usage())
            elif (kv := store.get(key_of(number))) is not None:
                assert same_kv(kv, chunk_kv(number))

    def delete_after_use(number: int) -> None:
        """Nobody else touches this chunk, so that its fate is certain."""
        for _ in range(50):
            store.put(key_of(number), chunk_kv(number))
            assert holds(store, number)
            store.delete(key_of(number))
            assert not holds(store, number)

    with mock.patch("os.fsync"):
        run_threads(
            *(lambda seed=seed: work(seed) for seed in range(3)), lambda: delete_after_use(100)
        )
        store.flush()
    for number in range(8):
        store.delete(key_of(number))
    assert store.keys() == frozenset()
    assert list(tmp_path.rglob("*.safetensors")) == []
    assert recorder.of(ChunkDamaged) == []


@pytest.mark.whole
def test_a_program_that_forgets_to_close_loses_nothing(tmp_path: Path) -> None:
    program = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from tests.store.store_chunks import Recorder, chunk_kv, key_of, sized
from tests.waiting import wait_until
from kvlinker.store import open_store
store = open_store(sized(Path({str(tmp_path)!r}), 1 << 20, 1 << 20), Recorder().events)
for number in range(5):
    store.put(key_of(number), chunk_kv(number))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 5


def test_kv_with_scores_takes_the_place_of_copies_without(
    recorder: Recorder, tmp_path: Path
) -> None:
    host, disk = HostTier(PLENTY, recorder.events), DiskTier(tmp_path, PLENTY, recorder.events)
    store, key = ChunkStore([host, disk], recorder.events), key_of(1)
    without = chunk_kv(1)
    plain = ChunkScores(Contextualization(3, 1.0), np.zeros(3, np.float32), np.ones(3, np.float32))
    scores = replace(plain, sensitivity=np.ones(3, np.float32))

    def stored() -> list[bool]:
        store.flush()
        return [not lacks_scores(tier, key) for tier in (host, disk)]

    assert not store.lacks_scores(key), "there is no copy"
    store.put(key, without)
    assert store.lacks_scores(key)
    assert stored() == [False, False]
    host.delete(key)
    assert store.lacks_scores(key)
    store.put(key, replace(without, scores=plain))
    assert store.lacks_scores(key), "sensitivity is one of them"
    store.put(key, replace(without, scores=scores))
    assert stored() == [True, True]
    assert not store.lacks_scores(key)
    for other in (
        without,
        replace(without, scores=replace(scores, received=np.zeros(3, np.float32))),
    ):
        store.put(key, other)
    assert stored() == [True, True], "a tier that has the chunk keeps its copy"
    assert [tier.get(key).scores.received.sum() for tier in (host, disk)] == [3, 3]  # type: ignore[union-attr]
