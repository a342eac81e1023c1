"""Loading layer by layer: in order, together, only while it pays, and never against a delete."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_chunks import Recorder, chunk_kv, key_of, same_kv

from kvlinker.events import ChunkDamaged, ChunkLoaded, ChunkLookup
from kvlinker.store import ChunkKV, ChunkStore, DiskTier, HostTier, LayerKV, layer_loader
from kvlinker.store.layer_loader import LayerLoader, Loaded, Opened, Urgency, Wanted
from kvlinker.store.layer_stream import ChunkReader, HeldReader, LayerLostError, LayerStream
from kvlinker.store.preloading import preload_depth
from kvlinker.store.remote import object_tier

PLENTY = 1 << 24
TIMEOUT = 10.0
ENDLESS = Urgency(compute=1e6, prefill=1e6)
"""Computing takes so long that everything is loaded, and one layer suffices to begin."""


class ScriptedReader:
    """Notes what is read into ``log``, waits for ``permits``, and fails at layer ``fails``."""

    def __init__(self, number: int, log: list[tuple[int, int]], *, layers: int = 4, fails: int | None = None) -> None:
        self.kv = chunk_kv(number, layers=layers)
        self.layers, self.nbytes, self.scores = layers, self.kv.nbytes, None
        self.permits: threading.Semaphore | None = None
        self.closed = 0
        self._number, self._log, self._fails = number, log, fails

    def read(self, layer: int) -> LayerKV:
        if self.permits is not None:
            assert self.permits.acquire(timeout=TIMEOUT)
        self._log.append((layer, self._number))
        if layer == self._fails:
            raise LayerLostError
        return self.kv.layers[layer]

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def loader() -> Iterator[LayerLoader]:
    made = LayerLoader()
    made.bandwidths.note("far", 1 << 40, 1.0)
    yield made
    made.close()


def wanted_of(reader: ChunkReader, ended: list[Loaded | None]) -> Wanted:
    return Wanted(lambda: Opened("far", reader), ended.append)


def wait_for(ended: list[Loaded | None], count: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while len(ended) < count:
        assert time.monotonic() < deadline, "nothing ended"
        time.sleep(0.002)


def complete(futures: list[Future[ChunkKV | None]]) -> list[ChunkKV | None]:
    """All layers of all chunks."""
    found = [future.result(timeout=TIMEOUT) for future in futures]
    return [kv and ChunkKV(tuple(kv.layers), kv.scores) for kv in found]


def test_the_chunks_that_a_thread_reads_advance_together(loader: LayerLoader) -> None:
    log: list[tuple[int, int]] = []
    ended: list[Loaded | None] = []
    threads = layer_loader.THREADS
    readers = [ScriptedReader(number, log, layers=3 if number < threads else 4) for number in range(2 * threads)]
    wanted = [wanted_of(reader, ended) for reader in readers]
    loader.load(wanted, ENDLESS)
    wait_for(ended, len(wanted))
    for first in range(threads):
        second = first + threads
        read = [entry for entry in log if entry[1] in (first, second)]
        assert read == [(layer, number) for layer in range(3) for number in (first, second)] + [(3, second)]
    assert all(one is not None for one in ended)
    for reader, kv in zip(readers, complete([one.future for one in wanted]), strict=True):
        assert kv is not None
        assert same_kv(kv, reader.kv)


@pytest.mark.parametrize(("share", "shares", "begins"), [(0.0, True, 4), (0.0, False, 1), (1e9, True, 1)])
def test_reading_that_takes_the_computations_processors_comes_first(
    loader: LayerLoader, monkeypatch: pytest.MonkeyPatch, share: float, shares: bool, begins: int
) -> None:
    monkeypatch.setattr(layer_loader, "BUSY_SHARE", share)
    ended: list[Loaded | None] = []
    reader = ScriptedReader(1, [])
    reader.permits = threading.Semaphore(begins - 1)
    wanted = wanted_of(reader, ended)
    loader.load([wanted], Urgency(ENDLESS.compute, ENDLESS.prefill, shares_processors=shares))
    with pytest.raises(TimeoutError):
        wanted.future.result(timeout=0.1)
    reader.permits.release()
    assert wanted.future.result(timeout=TIMEOUT) is not None
    reader.permits.release(4)
    wait_for(ended, 1)


def test_taking_a_layer_waits_for_it(loader: LayerLoader) -> None:
    ended: list[Loaded | None] = []
    reader = ScriptedReader(1, [])
    reader.permits = threading.Semaphore(1)
    wanted = wanted_of(reader, ended)
    loader.load([wanted], ENDLESS)
    kv = wanted.future.result(timeout=TIMEOUT)
    assert kv is not None
    assert kv.layers[0] is reader.kv.layers[0]
    threading.Timer(0.05, reader.permits.release, [3]).start()
    begin = time.monotonic()
    assert kv.layers[3] is reader.kv.layers[3]
    assert time.monotonic() - begin >= 0.04


def test_an_unmeasured_tier_delivers_all_before_anything_is_placed(loader: LayerLoader) -> None:
    ended: list[Loaded | None] = []
    reader = ScriptedReader(1, [])
    reader.permits = threading.Semaphore(3)
    wanted = Wanted(lambda: Opened("new", reader), ended.append)
    loader.load([wanted], ENDLESS)
    with pytest.raises(TimeoutError):
        wanted.future.result(timeout=0.1)
    reader.permits.release()
    assert wanted.future.result(timeout=TIMEOUT) is not None
    wait_for(ended, 1)
    assert loader.bandwidths.of("new") is not None


def test_a_lost_layer_loses_its_chunk_and_no_other(loader: LayerLoader) -> None:
    ended: list[Loaded | None] = []
    readers = [ScriptedReader(1, [], fails=2), ScriptedReader(2, [])]
    wanted = [wanted_of(reader, ended) for reader in readers]
    loader.load(wanted, ENDLESS)
    wait_for(ended, 2)
    broken, whole = (one.future.result(timeout=TIMEOUT) for one in wanted)
    assert broken is not None
    assert whole is not None
    with pytest.raises(LayerLostError):
        tuple(broken.layers)
    assert same_kv(ChunkKV(tuple(whole.layers)), readers[1].kv)
    assert [reader.closed for reader in readers] == [1, 1]
    assert sum(one is None for one in ended) == 1


def test_who_waits_in_vain_waits_once(loader: LayerLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_loader, "PATIENCE_SECONDS", 0.2)
    ended: list[Loaded | None] = []
    readers = [ScriptedReader(1, []), ScriptedReader(2, [])]
    permits = [threading.Semaphore(1), threading.Semaphore(1)]
    for reader, permit in zip(readers, permits, strict=True):
        reader.permits = permit
    wanted = [wanted_of(reader, ended) for reader in readers]
    loader.load(wanted, ENDLESS)
    found = [one.future.result(timeout=TIMEOUT) for one in wanted]
    begin = time.monotonic()
    for kv in found:
        assert kv is not None
        with pytest.raises(LayerLostError):
            kv.layers[3]
    assert 0.15 < time.monotonic() - begin < 0.4
    for permit in permits:
        permit.release(4)
    wait_for(ended, 2)
    assert ended == [None, None]


def test_what_cannot_begin_in_time_is_given_up(loader: LayerLoader) -> None:
    ended: list[Loaded | None] = []
    reader = ScriptedReader(1, [])
    reader.permits = threading.Semaphore(0)
    wanted = wanted_of(reader, ended)
    begin = time.monotonic()
    loader.load([wanted], Urgency(compute=1.0, prefill=0.01))
    assert wanted.future.result(timeout=TIMEOUT) is None
    assert time.monotonic() - begin < 2
    reader.permits.release(4)
    wait_for(ended, 1)
    assert ended == [None]


def test_closing_ends_what_is_read_and_what_waits() -> None:
    loader = LayerLoader()
    ended: list[Loaded | None] = []
    permits = threading.Semaphore(0)
    readers = [ScriptedReader(number, []) for number in range(2 * layer_loader.THREADS)]
    for reader in readers:
        reader.permits = permits
    wanted = [wanted_of(reader, ended) for reader in readers]
    for one in wanted:
        loader.load([one], ENDLESS)
    threading.Timer(0.1, permits.release, [100]).start()
    loader.close()
    assert [one.future.result(timeout=0) for one in wanted] == [None] * len(wanted)
    assert ended == [None] * len(wanted)
    late = wanted_of(ScriptedReader(9, []), ended)
    loader.load([late], ENDLESS)
    assert late.future.result(timeout=0) is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvlinker-layers")]


def test_a_slow_tier_is_tried_again_after_a_while(loader: LayerLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    loader.bandwidths.note("slow", 1000, 1.0)
    assert loader.worth_loading("slow", 1000, Urgency(prefill=1.5))
    assert not loader.worth_loading("slow", 1000, Urgency(prefill=0.5))
    monkeypatch.setattr("kvlinker.store.bandwidth.FRESH_SECONDS", 0.0)
    assert loader.worth_loading("slow", 1000, Urgency(prefill=0.5))


@given(layers=st.integers(1, 200), compute=st.integers(0, 1000), load=st.integers(0, 1000))
def test_with_the_preloaded_layers_none_is_missing_in_its_turn(layers: int, compute: int, load: int) -> None:
    """Reading proceeds at an even pace, and so does computing: the k-th layer is there when its turn comes."""
    depth = preload_depth(layers, compute_seconds=compute, load_seconds=load)
    assert 1 <= depth <= layers
    begin = depth * load / layers
    for layer in range(layers):
        there = (layer + 1) * load / layers
        turn = begin + layer * compute / layers
        assert there <= turn + 1e-9 * (load + compute)


def test_streams_know_slices_and_ends() -> None:
    stream = LayerStream(2, patience=0.01)
    kv = chunk_kv(1)
    assert stream.deliver(kv.layers[0])
    with pytest.raises(IndexError):
        stream[2]
    assert stream[-2] is kv.layers[0]
    assert stream.deliver(kv.layers[1])
    stream.lose()
    assert not stream.lost
    assert list(stream[:]) == list(kv.layers)


# --- the store


class Slow(HostTier):
    """Behind a gate: opens, but reads only once it may."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(PLENTY, recorder.events, name="slow")
        self.permits: threading.Semaphore | None = None

    def open(self, key: str) -> ChunkReader | None:
        kv = self.get(key)
        if kv is None:
            return None
        reader = ScriptedReader(0, [])
        reader.kv, reader.layers, reader.nbytes = kv, len(kv.layers), kv.nbytes
        reader.permits = self.permits
        return reader


def test_the_store_loads_from_wherever_chunks_are_and_promotes_them() -> None:
    recorder = Recorder()
    tiers = [HostTier(PLENTY, recorder.events), Slow(recorder)]
    store = ChunkStore(tiers, recorder.events)
    for number in range(2):
        store.put(key_of(number), chunk_kv(number))
    store.flush()
    tiers[0].delete(key_of(1))
    host, slow, missed = complete(store.load([key_of(0), key_of(1), key_of(2)], Urgency()))
    assert host is not None
    assert same_kv(host, chunk_kv(0))
    assert slow is not None
    assert same_kv(slow, chunk_kv(1))
    assert missed is None
    store.close()
    assert sorted(lookup.tier for lookup in recorder.of(ChunkLookup)) == ["host", "none", "slow"]
    assert sorted(loaded.tier for loaded in recorder.of(ChunkLoaded)) == ["host", "slow"]
    assert store.bandwidths.of("slow") is not None


def test_a_load_promotes_when_it_is_complete_but_never_what_was_deleted() -> None:
    for deleted in (False, True):
        recorder = Recorder()
        host, slow = HostTier(PLENTY, recorder.events), Slow(recorder)
        store = ChunkStore([host, slow], recorder.events)
        slow.put(key_of(1), chunk_kv(1))
        slow.permits = threading.Semaphore(1)
        (found,) = store.load([key_of(1)], Urgency())
        assert not host.contains(key_of(1))
        if deleted:
            store.delete(key_of(1))
        slow.permits.release(9)
        (kv,) = complete([found])
        assert kv is not None
        assert same_kv(kv, chunk_kv(1))
        store.close()
        assert len(recorder.of(ChunkLoaded)) == 1
        assert store.tier_of(key_of(1)) is None or not deleted
        assert len(recorder.of(ChunkLookup)) == 1


def test_what_is_sooner_computed_is_not_loaded() -> None:
    recorder = Recorder()
    slow = Slow(recorder)
    store = ChunkStore([HostTier(PLENTY, recorder.events), slow], recorder.events)
    slow.put(key_of(1), chunk_kv(1))
    store.bandwidths.note("slow", 1, 10.0)
    assert complete(store.load([key_of(1)], Urgency(compute=1.0, prefill=0.5))) == [None]
    store.close()
    assert [lookup.hit for lookup in recorder.of(ChunkLookup)] == [False]


def tier_of_kind(kind: str, folder: Path, recorder: Recorder) -> DiskTier:
    if kind == "disk":
        return DiskTier(folder, PLENTY, recorder.events)
    return object_tier(f"file://{folder}", PLENTY, recorder.events)


@pytest.mark.parametrize("kind", ["disk", "object"])
def test_tiers_open_what_they_hold_and_drop_what_is_damaged(kind: str, tmp_path: Path) -> None:
    recorder = Recorder()
    tier = tier_of_kind(kind, tmp_path / "tier", recorder)
    kv = chunk_kv(1, layers=5, tokens=40)
    assert tier.put(key_of(1), kv)
    assert tier.open(key_of(2)) is None
    reader = tier.open(key_of(1))
    assert reader is not None
    assert same_kv(ChunkKV(tuple(reader.read(layer) for layer in range(reader.layers)), reader.scores), kv)
    assert reader.nbytes == kv.nbytes
    reader.close()
    reader.close()
    (path,) = [path for path in (tmp_path / "tier").rglob("*") if path.is_file() and path.stat().st_size > kv.nbytes]
    data = bytearray(path.read_bytes())
    data[-kv.nbytes // 2] ^= 1
    path.write_bytes(data)
    reader = tier.open(key_of(1))
    assert reader is not None
    assert same_kv(ChunkKV((reader.read(0),)), ChunkKV(kv.layers[:1]))
    with pytest.raises(LayerLostError, match=r"layer\.02"):
        reader.read(2)
    reader.close()
    assert [damage.key for damage in recorder.of(ChunkDamaged)] == [key_of(1)]
    assert not tier.contains(key_of(1))
    assert tier.open(key_of(1)) is None
    tier.close()


def test_kv_in_memory_can_be_opened() -> None:
    kv = chunk_kv(3)
    tier = HostTier(PLENTY, Recorder().events)
    tier.put(key_of(3), kv)
    reader = tier.open(key_of(3))
    assert isinstance(reader, HeldReader)
    assert [reader.read(layer) for layer in range(reader.layers)] == list(kv.layers)
    assert tier.open(key_of(4)) is None
