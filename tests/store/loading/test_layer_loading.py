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

from kvlinker.events import ChunkDamaged, ChunkLoaded, ChunkLookup
from kvlinker.store import ChunkKV, ChunkStore, DiskTier, HostTier, LayerKV, Speeds
from kvlinker.store.loading import bandwidth, layer_loader, load_job, reader_threads
from kvlinker.store.loading.bandwidth import Bandwidths, LoadTime
from kvlinker.store.loading.joined_reader import UnderWay
from kvlinker.store.loading.layer_loader import LayerLoader
from kvlinker.store.loading.layer_stream import ChunkReader, HeldReader, LayerLostError, LayerStream
from kvlinker.store.loading.load_job import LoadJob
from kvlinker.store.loading.reader_threads import ReaderThreads
from kvlinker.store.loading.wanted import Loaded, Opened, Urgency, Wanted, preload_depth
from kvlinker.store.tiers import object_tier
from tests.store.store_chunks import Recorder, chunk_kv, key_of, same_kv

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
    """Of a chunk of its own."""
    return Wanted(str(id(reader)), lambda: Opened("far", reader), ended.append)


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
    monkeypatch.setattr(bandwidth, "BUSY_SHARE", share)
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
    wanted = Wanted("key", lambda: Opened("new", reader), ended.append)
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
    monkeypatch.setattr(load_job, "PATIENCE_SECONDS", 0.5)
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
    assert 0.4 < time.monotonic() - begin < 0.9
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
    monkeypatch.setattr("kvlinker.store.loading.bandwidth.FRESH_SECONDS", 0.0)
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
        self.opened = threading.Semaphore(0)
        self.reads: list[tuple[int, int]] = []

    def open(self, key: str) -> ChunkReader | None:
        kv = self.get(key)
        if kv is None:
            return None
        reader = ScriptedReader(int(key[:8], 16), self.reads)
        reader.kv, reader.layers, reader.nbytes = kv, len(kv.layers), kv.nbytes
        reader.permits = self.permits
        self.opened.release()
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
        assert slow.opened.acquire(timeout=TIMEOUT)
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


@pytest.fixture
def slow_store() -> Iterator[tuple[ChunkStore, Slow]]:
    """A store whose chunks 1 and 2, of two layers, lie in a slow tier that waits for permits."""
    recorder = Recorder()
    slow = Slow(recorder)
    store = ChunkStore([HostTier(PLENTY, recorder.events), slow], recorder.events)
    for number in (1, 2):
        slow.put(key_of(number), chunk_kv(number))
    slow.permits = threading.Semaphore(0)
    yield store, slow
    slow.permits.release(100)
    store.close()


def reads_of(slow: Slow, number: int) -> list[int]:
    return [layer for layer, read in slow.reads if read == int(key_of(number)[:8], 16)]


def test_a_chunk_that_two_load_at_once_is_read_once(slow_store: tuple[ChunkStore, Slow]) -> None:
    store, slow = slow_store
    assert slow.permits is not None
    (first,) = store.load([key_of(1)], ENDLESS)
    assert slow.opened.acquire(timeout=TIMEOUT)
    (second,) = store.load([key_of(1)], ENDLESS)
    slow.permits.release(2)
    for kv in complete([first, second]):
        assert kv is not None
        assert same_kv(kv, chunk_kv(1))
    assert reads_of(slow, 1) == [0, 1]
    assert not slow.opened.acquire(blocking=False)


def test_a_chunk_that_stands_twice_in_a_prompt_is_read_once(slow_store: tuple[ChunkStore, Slow]) -> None:
    store, slow = slow_store
    assert slow.permits is not None
    slow.permits.release(10)
    keys = [key_of(1), key_of(2), key_of(1), key_of(2), key_of(1)]  # each thread has those of one chunk
    assert all(kv is not None for kv in complete(store.load(keys, ENDLESS)))
    assert (reads_of(slow, 1), reads_of(slow, 2)) == ([0, 1], [0, 1])


def test_what_came_to_memory_while_it_waited_is_not_read_again(slow_store: tuple[ChunkStore, Slow]) -> None:
    store, slow = slow_store
    assert slow.permits is not None
    busy = store.load([key_of(1), key_of(2)], ENDLESS)
    for _ in range(layer_loader.THREADS):
        assert slow.opened.acquire(timeout=TIMEOUT)
    late = store.load([key_of(2), key_of(1)], ENDLESS)
    slow.permits.release(4)
    assert all(kv is not None for kv in complete([*busy, *late]))
    assert (reads_of(slow, 1), reads_of(slow, 2)) == ([0, 1], [0, 1])


def test_two_that_join_each_other_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_job, "PATIENCE_SECONDS", 60.0)
    threads, under_way = ReaderThreads(2), UnderWay()
    both_have_one = threading.Barrier(2, timeout=TIMEOUT)
    log: list[tuple[int, int]] = []
    ended: list[Loaded | None] = []

    def wanted(number: int, *, first: bool) -> Wanted:
        def opens() -> Opened:
            return Opened("far", ScriptedReader(number, log))

        def opens_with_the_other() -> Opened:
            both_have_one.wait()
            return opens()

        return Wanted(str(number), opens_with_the_other if first else opens, ended.append)

    # Each waits for the other after its first chunk is open, and registered, but not yet its second one.
    jobs = [[wanted(1, first=False), wanted(0, first=True), wanted(2, first=False)]]
    jobs.append([wanted(2, first=False), wanted(3, first=True), wanted(1, first=False)])
    for job in jobs:
        LoadJob(job, ENDLESS, threads, Bandwidths(), under_way, threading.Event(), parts=1).start()
    assert all(kv is not None for kv in complete([one.future for job in jobs for one in job]))
    assert sorted(log) == [(layer, number) for layer in range(4) for number in range(4)], "each is read once"
    threads.close()


def test_who_joins_does_not_give_up_with_the_first(slow_store: tuple[ChunkStore, Slow]) -> None:
    store, slow = slow_store
    assert slow.permits is not None
    (hasty,) = store.load([key_of(1)], Urgency(compute=1.0, prefill=0.01))
    assert slow.opened.acquire(timeout=TIMEOUT)
    (patient,) = store.load([key_of(1)], ENDLESS)
    assert hasty.result(timeout=TIMEOUT) is None
    slow.permits.release(3)
    (kv,) = complete([patient])
    assert kv is not None
    assert same_kv(kv, chunk_kv(1))
    assert slow.opened.acquire(timeout=TIMEOUT), "a copy of its own took over"


def test_who_joins_keeps_its_own_deadline(slow_store: tuple[ChunkStore, Slow]) -> None:
    store, slow = slow_store
    assert slow.permits is not None
    (patient,) = store.load([key_of(1)], ENDLESS)
    assert slow.opened.acquire(timeout=TIMEOUT)
    (hasty,) = store.load([key_of(1)], Urgency(compute=1.0, prefill=0.01))
    assert hasty.result(timeout=TIMEOUT) is None
    slow.permits.release(2)
    (kv,) = complete([patient])
    assert kv is not None
    assert same_kv(kv, chunk_kv(1))


def test_who_waits_for_anothers_layer_takes_nothing_from_him() -> None:
    stream = LayerStream(1, patience=10.0)
    assert stream.wait(0, 0.01) is None
    assert not stream.lost
    kv = chunk_kv(1)
    assert stream.deliver(kv.layers[0])
    assert stream.wait(0, 0.0) is kv.layers[0]


# --- reads that hang


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_job, "STALL_SECONDS", 0.05)


def hanging(count: int) -> tuple[list[ScriptedReader], threading.Semaphore]:
    """Readers that hang until the semaphore lets them go."""
    permits = threading.Semaphore(0)
    readers = [ScriptedReader(number, []) for number in range(count)]
    for reader in readers:
        reader.permits = permits
    return readers, permits


def threads_of_loaders() -> int:
    return sum(thread.name.startswith("kvlinker-layers") for thread in threading.enumerate())


@pytest.mark.usefixtures("impatient")
def test_reads_that_hang_do_not_hold_up_others(loader: LayerLoader, caplog: pytest.LogCaptureFixture) -> None:
    ended: list[Loaded | None] = []
    readers, permits = hanging(layer_loader.THREADS)
    before = threads_of_loaders()
    for reader in readers:
        wanted = wanted_of(reader, ended)
        loader.load([wanted], Urgency(compute=1.0, prefill=0.01))
        assert wanted.future.result(timeout=TIMEOUT) is None
    wait_for(ended, len(readers))
    assert ended == [None] * len(readers)
    sound = wanted_of(ScriptedReader(9, []), ended)
    loader.load([sound], ENDLESS)
    (kv,) = complete([sound.future])
    assert kv is not None
    assert [reader.closed for reader in readers] == [0] * len(readers), "a read is under way"
    assert sum("does not return" in message for message in caplog.messages) == len(readers)
    permits.release(100)
    deadline = time.monotonic() + TIMEOUT
    while any(reader.closed != 1 for reader in readers) or threads_of_loaders() > before + layer_loader.THREADS:
        assert time.monotonic() < deadline, "the threads did not end"
        time.sleep(0.002)
    assert len(ended) == len(readers) + 1


@pytest.mark.usefixtures("impatient")
def test_opening_may_hang_too(loader: LayerLoader) -> None:
    ended: list[Loaded | None] = []
    returns = threading.Event()
    reader = ScriptedReader(1, [])

    def opens() -> Opened:
        assert returns.wait(TIMEOUT)
        return Opened("far", reader)

    for number in range(layer_loader.THREADS):
        loader.load([Wanted(str(number), opens, ended.append)], Urgency(compute=1.0, prefill=0.01))
    wait_for(ended, layer_loader.THREADS)
    sound = wanted_of(ScriptedReader(9, []), ended)
    loader.load([sound], ENDLESS)
    assert complete([sound.future]) != [None]
    returns.set()
    deadline = time.monotonic() + TIMEOUT
    while reader.closed < layer_loader.THREADS:
        assert time.monotonic() < deadline, "what was opened too late is not closed"
        time.sleep(0.002)


@pytest.mark.usefixtures("impatient")
def test_no_more_than_so_many_threads_are_replaced(
    loader: LayerLoader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reader_threads, "MOST_ABANDONED", 3)
    before = threads_of_loaders()
    ended: list[Loaded | None] = []
    readers, permits = hanging(8)
    for reader in readers:
        wanted = wanted_of(reader, ended)
        loader.load([wanted], Urgency(compute=1.0, prefill=0.01))
        assert wanted.future.result(timeout=TIMEOUT) is None
    deadline = time.monotonic() + TIMEOUT
    while "too many hang" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert threads_of_loaders() - before <= layer_loader.THREADS + 3
    permits.release(1000)
    wait_for(ended, len(readers))
    sound = wanted_of(ScriptedReader(99, []), ended)
    loader.load([sound], ENDLESS)
    assert complete([sound.future]) != [None], "once they have returned, reading goes on"


@pytest.mark.usefixtures("impatient")
def test_a_read_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_threads, "CLOSE_SECONDS", 0.1)
    loader = LayerLoader()
    ended: list[Loaded | None] = []
    (reader,), permits = hanging(1)
    loader.load([wanted_of(reader, ended)], ENDLESS)
    begin = time.monotonic()
    loader.close()
    assert time.monotonic() - begin < TIMEOUT / 2
    permits.release(9)
    wait_for(ended, 1)


def test_what_is_sooner_computed_is_not_loaded() -> None:
    recorder = Recorder()
    slow = Slow(recorder)
    store = ChunkStore([HostTier(PLENTY, recorder.events), slow], recorder.events)
    slow.put(key_of(1), chunk_kv(1))
    store.bandwidths.note("slow", 1, 10.0)
    assert complete(store.load([key_of(1)], Urgency(compute=1.0, prefill=0.5))) == [None]
    store.close()
    assert [lookup.hit for lookup in recorder.of(ChunkLookup)] == [False]


def test_what_is_decided_is_loaded_even_if_it_were_sooner_computed() -> None:
    recorder = Recorder()
    slow = Slow(recorder)
    store = ChunkStore([HostTier(PLENTY, recorder.events), slow], recorder.events)
    slow.put(key_of(1), chunk_kv(1))
    store.bandwidths.note("slow", 1, 10.0)
    (kv,) = complete(store.load([key_of(1)], Urgency(compute=1.0, prefill=0.5, decided=True)))
    store.close()
    assert kv is not None
    assert same_kv(kv, chunk_kv(1))


def test_how_long_loading_takes_is_summed_over_the_chunks_tiers() -> None:
    recorder = Recorder()
    host, slow, slower = HostTier(PLENTY, recorder.events), Slow(recorder), Slow(recorder)
    slower.name = slower.speed_name = "slower"
    store = ChunkStore([host, slow, slower], recorder.events)
    host.put(key_of(0), chunk_kv(0))
    slow.put(key_of(1), chunk_kv(1))
    slower.put(key_of(1), chunk_kv(1))
    slower.put(key_of(2), chunk_kv(2, tokens=9))
    everything = [key_of(number) for number in range(4)]
    assert store.load_time([key_of(0), key_of(3)]) == LoadTime()  # in memory, and nowhere
    assert store.load_time(everything) is None
    store.bandwidths.note("slow", 1000, 1.0)
    assert store.load_time([key_of(1)]) == LoadTime(chunk_kv(1).nbytes / 1000)
    assert store.load_time(everything) is None
    store.bandwidths.note("slower", 100, 1.0, 0.25)
    expected = chunk_kv(1).nbytes / 1000 + chunk_kv(2, tokens=9).nbytes / 100
    found = store.load_time(everything)
    assert found is not None
    assert found.seconds == pytest.approx(expected)
    assert found.busy == pytest.approx(chunk_kv(2, tokens=9).nbytes / 100 / 4)
    store.close()
    assert recorder.of(ChunkLookup) == []


def test_ahead_of_time_one_prompts_chunks_at_a_time_are_loaded() -> None:
    recorder = Recorder()
    host, slow = HostTier(PLENTY, recorder.events), Slow(recorder)
    store = ChunkStore([host, slow], recorder.events)
    for number in range(3):
        slow.put(key_of(number), chunk_kv(number))
    store.bandwidths.note("slow", 1, 10.0)  # whatever it takes
    slow.permits = threading.Semaphore(0)
    store.load_ahead([key_of(0)])
    store.load_ahead([key_of(1)])
    slow.permits.release(9)
    deadline = time.monotonic() + TIMEOUT
    while not host.contains(key_of(0)):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert not host.contains(key_of(1))
    while not host.contains(key_of(2)):
        assert time.monotonic() < deadline
        store.load_ahead([key_of(2)])
        time.sleep(0.002)
    store.close()


def test_speeds_are_kept_under_the_tiers_names() -> None:
    recorder = Recorder()
    speeds = Speeds()
    tiers = [HostTier(PLENTY, recorder.events), Slow(recorder)]
    tiers[1].speed_name = "load slow raw there"
    store = ChunkStore(tiers, recorder.events, speeds=speeds)
    store.bandwidths.note("slow", 1000, 1.0)
    store.close()
    assert speeds.of("load slow raw there") == (1000, 0)
    assert store.bandwidths.known() == {"slow": 1000}


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
