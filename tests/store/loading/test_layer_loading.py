"""Loading layer by layer: in order, together, only while it pays, and never against a delete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.events import ChunkDamaged, ChunkLoaded, ChunkLookup
from kvlinker.store import ChunkKV, ChunkStore, DiskTier, HostTier, LayerKV, Speeds
from kvlinker.store.chunk_kv import ChunkReader, ChunkState, LayerLostError
from kvlinker.store.loading import bandwidths as bandwidth
from kvlinker.store.loading import loader as module
from kvlinker.store.loading import prompt_load
from kvlinker.store.loading.arriving import KV, ArrivingKV
from kvlinker.store.loading.bandwidths import DRIFT_NOTES, LoadTime
from kvlinker.store.loading.loader import LayerLoader
from kvlinker.store.loading.prompt_load import (
    ChunkLoad,
    LoadedChunk,
    OpenedChunk,
    Urgency,
    preload_depth,
)
from kvlinker.store.remote.objects import object_tier
from kvlinker.store.tiers.base import Tier
from kvlinker.store.tiers.host import ResidentReader
from tests.clocks import ManualClock
from tests.store.store_chunks import Recorder, awaited, chunk_kv, key_of, same_kv
from tests.waiting import wait_until

PLENTY = 1 << 24
TIMEOUT = 10.0
ENDLESS = Urgency(compute=1e6, prefill=1e6)
"""Computing takes so long that everything is loaded, and one layer suffices to begin."""
HASTY = Urgency(compute=1.0, prefill=0.01)
"""What has not begun after the shortest time is computed instead."""
HANGING = module.STALL_SECONDS + 1
"""The seconds after which a read that began at their beginning hangs; nobody but the hasty gives up
before."""


class ScriptedReader:
    """Notes what is read into ``log``, waits for ``permits``, and fails at layer ``fails``.
    ``asked`` is the last layer that somebody began to read."""

    def __init__(
        self, number: int, log: list[tuple[int, int]], *, layers: int = 4, fails: int | None = None
    ) -> None:
        self.kv = chunk_kv(number, layers=layers)
        self.layers, self.tokens, self.nbytes, self.scores = (
            layers,
            self.kv.tokens,
            self.kv.nbytes,
            None,
        )
        self.contexts, self.states = 1, ()
        self.permits: threading.Semaphore | None = None
        self.asked = -1
        self.closed = 0
        self._number, self._log, self._fails = number, log, fails

    def read(self, layer: int) -> LayerKV:
        self.asked = layer
        if self.permits is not None:
            assert self.permits.acquire(timeout=TIMEOUT)
        self._log.append((layer, self._number))
        if layer == self._fails:
            raise LayerLostError
        return self.kv.layers[layer]

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def loader(clock: ManualClock) -> Iterator[LayerLoader]:
    """Nothing is too late for it unless the clock is put forward."""
    made = LayerLoader(clock=clock)
    made.bandwidths.note("far", 1 << 40, 1.0)
    yield made
    made.close()


def chunk_of(reader: ChunkReader, ended: list[LoadedChunk | None]) -> ChunkLoad:
    """A chunk of its own, of which there is one copy."""
    return opened_by(lambda: OpenedChunk("far", reader), ended, key=str(id(reader)))


def opened_by(
    opens: Callable[[], OpenedChunk | LoadedChunk | None],
    ended: list[LoadedChunk | None],
    *,
    key: str,
) -> ChunkLoad:
    chunk = ChunkLoad(key, lambda tried: None if tried else opens())
    chunk.ended.add_done_callback(lambda future: ended.append(future.result()))
    return chunk


def wait_for(ended: list[LoadedChunk | None], count: int) -> None:
    wait_until(lambda: len(ended) >= count)


def complete(futures: Sequence[Future[KV | None]]) -> list[ChunkKV | None]:
    """All layers of all chunks."""
    return [whole(future.result(timeout=TIMEOUT)) for future in futures]


def whole(kv: KV | None) -> ChunkKV | None:
    if not isinstance(kv, ArrivingKV):
        return kv
    layers = [awaited(kv, layer) for layer in range(kv.layer_count)]
    assert not kv.lost, "the chunk was lost"
    return ChunkKV(tuple(layer for layer in layers if layer is not None), kv.scores)


def arriving(chunk: ChunkLoad) -> ArrivingKV:
    """What the chunk begins with, before all of it is there."""
    kv = chunk.begun.result(timeout=TIMEOUT)
    assert isinstance(kv, ArrivingKV)
    return kv


def test_the_chunks_of_a_prompt_advance_together(
    loader: LayerLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "THREADS", 1)
    log: list[tuple[int, int]] = []
    ended: list[LoadedChunk | None] = []
    readers = [ScriptedReader(number, log, layers=3 if number < 2 else 4) for number in range(5)]
    chunks = [chunk_of(reader, ended) for reader in readers]
    loader.load(chunks, ENDLESS)
    wait_for(ended, len(chunks))
    assert log == [
        (layer, number)
        for layer in range(4)
        for number in range(5)
        if layer < readers[number].layers
    ]
    assert all(one is not None for one in ended)
    for reader, kv in zip(readers, complete([one.begun for one in chunks]), strict=True):
        assert kv is not None
        assert same_kv(kv, reader.kv)


def test_a_chunk_without_layers_is_there_once_it_is_opened(loader: LayerLoader) -> None:
    """What layers with a state keep of it was read with its header, and is what was measured."""
    ended: list[LoadedChunk | None] = []
    state = ChunkState(torch.zeros(5, 8), (torch.zeros(5, 2),))
    kv = ChunkKV((), None, (state,), 5)
    chunk = chunk_of(ResidentReader(kv), ended)
    loader.load([chunk], ENDLESS)
    wait_for(ended, 1)
    found = ended[0]
    assert found is not None
    assert (found.kv.tokens, found.kv.states) == (5, (state,))
    begun = chunk.begun.result(timeout=TIMEOUT)
    assert begun is not None
    assert begun.states == (state,)
    assert begun.tokens == 5
    wait_until(lambda: (loader.bandwidths.of("far") or 0) < 1 << 40)


def test_who_came_first_is_served_first(
    loader: LayerLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "THREADS", 1)
    log: list[tuple[int, int]] = []
    ended: list[LoadedChunk | None] = []
    permits = threading.Semaphore(0)
    prompts = [
        [ScriptedReader(10 * prompt + number, log) for number in range(4)] for prompt in range(2)
    ]
    for readers in prompts:
        for reader in readers:
            reader.permits = permits
        loader.load([chunk_of(reader, ended) for reader in readers], ENDLESS)
    permits.release(100)
    wait_for(ended, 8)
    assert [number // 10 for _, number in log] == [0] * 16 + [1] * 16


@pytest.mark.parametrize(
    ("share", "shares", "begins"), [(0.0, True, 4), (0.0, False, 1), (1e9, True, 1)]
)
def test_reading_that_takes_the_computations_processors_comes_first(
    loader: LayerLoader, monkeypatch: pytest.MonkeyPatch, share: float, shares: bool, begins: int
) -> None:
    monkeypatch.setattr(bandwidth, "BUSY_SHARE", share)
    monkeypatch.setattr(module, "THREADS", 1)
    loader.bandwidths.note("far", 1 << 40, 1.0, 1.0)
    ended: list[LoadedChunk | None] = []
    reader = ScriptedReader(1, [])
    reader.permits = threading.Semaphore(begins - 1)
    wanted = chunk_of(reader, ended)
    loader.load([wanted], Urgency(ENDLESS.compute, ENDLESS.prefill, shares_processors=shares))
    wait_until(lambda: reader.asked == begins - 1)
    assert not wanted.begun.done()
    reader.permits.release()
    assert wanted.begun.result(timeout=TIMEOUT) is not None
    reader.permits.release(4)
    wait_for(ended, 1)


def test_layers_can_be_waited_for(loader: LayerLoader) -> None:
    ended: list[LoadedChunk | None] = []
    reader = ScriptedReader(1, [])
    reader.permits = threading.Semaphore(1)
    chunk = chunk_of(reader, ended)
    loader.load([chunk], ENDLESS)
    kv = arriving(chunk)
    assert (kv.tokens, kv.scores) == (reader.kv.tokens, None)
    assert kv.layer(0) is reader.kv.layers[0]
    assert kv.layer(3) is None
    reader.permits.release(3)
    assert awaited(kv, 3) is reader.kv.layers[3]
    assert kv.complete


def test_an_unmeasured_tier_delivers_all_before_anything_is_placed(
    loader: LayerLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "THREADS", 1)
    ended: list[LoadedChunk | None] = []
    reader = ScriptedReader(1, [])
    reader.permits = threading.Semaphore(3)
    wanted = opened_by(lambda: OpenedChunk("new", reader), ended, key="key")
    loader.load([wanted], ENDLESS)
    wait_until(lambda: reader.asked == 3)
    assert not wanted.begun.done()
    reader.permits.release()
    assert wanted.begun.result(timeout=TIMEOUT) is not None
    wait_for(ended, 1)
    assert loader.bandwidths.of("new") is not None


def test_a_lost_layer_loses_its_chunk_and_no_other(loader: LayerLoader) -> None:
    ended: list[LoadedChunk | None] = []
    readers = [ScriptedReader(1, [], fails=2), ScriptedReader(2, [])]
    readers[0].permits = threading.Semaphore(2)
    wanted = [chunk_of(reader, ended) for reader in readers]
    loader.load(wanted, ENDLESS)
    broken = arriving(wanted[0])
    readers[0].permits.release()
    wait_for(ended, 2)
    assert broken.lost
    assert [awaited(broken, layer) is None for layer in range(4)] == [False, False, True, True]
    (sound,) = complete([wanted[1].begun])
    assert sound is not None
    assert same_kv(sound, readers[1].kv)
    assert [reader.closed for reader in readers] == [1, 1]
    assert sum(one is None for one in ended) == 1


def test_what_comes_too_late_for_the_computation_is_lost_with_all_of_the_prompt(
    loader: LayerLoader, clock: ManualClock
) -> None:
    ended: list[LoadedChunk | None] = []
    readers = [ScriptedReader(number, []) for number in range(2)]
    permits = [threading.Semaphore(1), threading.Semaphore(1)]
    for reader, permit in zip(readers, permits, strict=True):
        reader.permits = permit
    chunks = [chunk_of(reader, ended) for reader in readers]
    loader.bandwidths.note("far", 1 << 40, 1.0)
    loader.load(chunks, Urgency(compute=0.1, prefill=1e6))
    found = [arriving(chunk) for chunk in chunks]
    (prompt,) = loader._prompts
    wait_until(lambda: prompt.begun)
    assert prompt.deadline == pytest.approx(clock.now + 0.1 + prompt_load.PATIENCE_SECONDS)
    clock.now = prompt.deadline
    assert [awaited(kv, 3) for kv in found] == [None, None]
    assert all(kv.lost for kv in found)
    assert ended == [None, None]
    for permit in permits:
        permit.release(4)
    wait_until(lambda: [reader.closed for reader in readers] == [1, 1])


def test_who_holds_nobody_up_begins_with_the_first_layer_and_may_wait_for_the_rest(
    loader: LayerLoader, clock: ManualClock
) -> None:
    reader = ScriptedReader(1, [])
    reader.permits = threading.Semaphore(1)
    wanted = chunk_of(reader, [])
    for _ in range(DRIFT_NOTES):
        loader.bandwidths.note("far", reader.nbytes, 1.0)
    loader.load([wanted], Urgency(compute=0.01, prefill=1e6, alone=True))
    kv = arriving(wanted)
    assert kv.delivered == 1
    (prompt,) = loader._prompts
    wait_until(lambda: prompt.begun)
    assert prompt.deadline > clock.now + 0.9 + prompt_load.PATIENCE_SECONDS, (
        "the reading takes a second"
    )
    reader.permits.release(4)
    assert awaited(kv, 3) is not None


def test_what_cannot_begin_in_time_is_given_up(loader: LayerLoader, clock: ManualClock) -> None:
    ended: list[LoadedChunk | None] = []
    reader = ScriptedReader(1, [])
    reader.permits = threading.Semaphore(0)
    wanted = chunk_of(reader, ended)
    loader.load([wanted], HASTY)
    assert not wanted.begun.done()
    clock.advance(prompt_load.LEAST_DEADLINE_SECONDS)
    assert wanted.begun.result(timeout=TIMEOUT) is None
    reader.permits.release(4)
    wait_for(ended, 1)
    assert ended == [None]


def test_closing_ends_what_is_read_and_what_waits() -> None:
    loader = LayerLoader()
    ended: list[LoadedChunk | None] = []
    permits = threading.Semaphore(0)
    readers = [ScriptedReader(number, []) for number in range(2 * module.THREADS)]
    for reader in readers:
        reader.permits = permits
    wanted = [chunk_of(reader, ended) for reader in readers]
    for one in wanted:
        loader.load([one], ENDLESS)
    closing = threading.Thread(target=loader.close)
    closing.start()
    wait_for(ended, len(wanted))
    permits.release(100)
    closing.join(TIMEOUT)
    assert [one.begun.result(timeout=0) for one in wanted] == [None] * len(wanted)
    assert ended == [None] * len(wanted)
    late = chunk_of(ScriptedReader(9, []), ended)
    loader.load([late], ENDLESS)
    assert late.begun.result(timeout=0) is None
    own = ("kvlinker-layers", "kvlinker-loading-watch")
    assert not [thread for thread in threading.enumerate() if thread.name in own]


def test_a_slow_tier_is_tried_again_after_a_while(
    loader: LayerLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader.bandwidths.note("slow", 1000, 1.0)
    assert loader.bandwidths.worth_loading("slow", 1000, 1.5)
    assert not loader.bandwidths.worth_loading("slow", 1000, 0.5)
    monkeypatch.setattr(bandwidth, "FRESH_SECONDS", 0.0)
    assert loader.bandwidths.worth_loading("slow", 1000, 0.5)


@given(layers=st.integers(1, 200), compute=st.integers(0, 1000), load=st.integers(0, 1000))
def test_with_the_preloaded_layers_none_is_missing_in_its_turn(
    layers: int, compute: int, load: int
) -> None:
    """Reading proceeds at an even pace, and so does computing: the k-th layer is there when its
    turn comes."""
    depth = preload_depth(layers, compute_seconds=compute, load_seconds=load)
    assert 1 <= depth <= layers
    begin = depth * load / layers
    for layer in range(layers):
        there = (layer + 1) * load / layers
        turn = begin + layer * compute / layers
        assert there <= turn + 1e-9 * (load + compute)


# --- KV that is arriving


def empty(layers: int = 2) -> ArrivingKV:
    return ArrivingKV(layers, tokens=3)


def test_layers_that_cannot_be_are_refused() -> None:
    for index in (-1, 2):
        with pytest.raises(IndexError, match="that has 2"):
            empty().layer(index)


def test_what_is_complete_cannot_be_lost() -> None:
    kv, layers = empty(), chunk_kv(1).layers
    assert [kv.deliver(layer) for layer in layers] == [True, True]
    kv.give_up()
    assert not kv.lost
    assert kv.complete
    assert [kv.layer(index) for index in range(2)] == list(layers)


def test_what_was_given_up_takes_no_further_layer_and_keeps_those_it_has() -> None:
    kv, (first, second) = empty(), chunk_kv(1).layers
    assert kv.deliver(first)
    kv.give_up()
    assert not kv.deliver(second)
    assert kv.lost
    assert (kv.layer(0), kv.layer(1), kv.delivered) == (first, None, 1)
    assert awaited(kv, 1) is None


def test_who_looks_too_early_loses_nothing() -> None:
    kv = empty()
    assert kv.layer(0) is None
    assert not kv.lost
    layer = chunk_kv(1).layers[0]
    assert kv.deliver(layer)
    assert kv.layer(0) is layer


def test_whoever_waits_notices_at_once_that_layers_are_lost() -> None:
    kv = empty()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(awaited, kv, 1, seconds=1e6)
        kv.give_up()
        assert waiting.result(TIMEOUT) is None


def test_subscribers_are_told_of_each_layer_and_of_the_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kv, told = empty(3), []

    def fails() -> None:
        raise RuntimeError("as the test wants")

    kv.subscribe(fails)
    kv.subscribe(lambda: told.append((kv.delivered, kv.lost)))
    for layer in chunk_kv(1).layers:
        kv.deliver(layer)
    kv.give_up()
    kv.give_up()
    assert told == [(1, False), (2, False), (2, True)]
    assert "A listener of a chunk's arrival failed" in caplog.text


def test_a_subscriber_that_subscribes_again_is_called_once_a_layer() -> None:
    """A chunk that arrives while several steps run is subscribed to in each of them."""
    kv, calls = empty(2), []

    class Scheduler:
        def wake(self) -> None:
            calls.append(kv.delivered)

    scheduler = Scheduler()
    for layer in chunk_kv(2).layers:
        kv.subscribe(scheduler.wake)
        kv.deliver(layer)
    assert calls == [1, 2]


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
        reader.kv, reader.layers, reader.tokens, reader.nbytes = (
            kv,
            len(kv.layers),
            kv.tokens,
            kv.nbytes,
        )
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
def slow_store(clock: ManualClock) -> Iterator[tuple[ChunkStore, Slow]]:
    """A store whose chunks 1 and 2, of two layers, lie in a slow tier that waits for permits."""
    recorder = Recorder()
    slow = Slow(recorder)
    store = ChunkStore([HostTier(PLENTY, recorder.events), slow], recorder.events, clock=clock)
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


def test_a_chunk_that_stands_twice_in_a_prompt_is_read_once(
    slow_store: tuple[ChunkStore, Slow],
) -> None:
    store, slow = slow_store
    assert slow.permits is not None
    slow.permits.release(10)
    keys = [
        key_of(1),
        key_of(2),
        key_of(1),
        key_of(2),
        key_of(1),
    ]  # each thread has those of one chunk
    assert all(kv is not None for kv in complete(store.load(keys, ENDLESS)))
    assert (reads_of(slow, 1), reads_of(slow, 2)) == ([0, 1], [0, 1])


def test_what_came_to_memory_while_it_waited_is_not_read_again(
    slow_store: tuple[ChunkStore, Slow],
) -> None:
    store, slow = slow_store
    assert slow.permits is not None
    busy = store.load([key_of(1), key_of(2)], ENDLESS)
    for _ in range(module.THREADS):
        assert slow.opened.acquire(timeout=TIMEOUT)
    late = store.load([key_of(2), key_of(1)], ENDLESS)
    slow.permits.release(4)
    assert all(kv is not None for kv in complete([*busy, *late]))
    assert (reads_of(slow, 1), reads_of(slow, 2)) == ([0, 1], [0, 1])


def test_prompts_that_share_chunks_in_any_order_read_each_once(loader: LayerLoader) -> None:
    log: list[tuple[int, int]] = []
    ended: list[LoadedChunk | None] = []
    permits = threading.Semaphore(0)

    def chunk(number: int) -> ChunkLoad:
        reader = ScriptedReader(number, log)
        reader.permits = permits
        return opened_by(lambda: OpenedChunk("far", reader), ended, key=str(number))

    prompts = [[chunk(number) for number in numbers] for numbers in ((1, 0, 2), (2, 3, 1))]
    for chunks in prompts:
        loader.load(chunks, ENDLESS)
    permits.release(100)
    assert all(
        kv is not None for kv in complete([one.begun for chunks in prompts for one in chunks])
    )
    assert sorted(log) == [(layer, number) for layer in range(4) for number in range(4)], (
        "each is read once"
    )


def test_reading_goes_on_for_who_joins_when_the_first_gives_up(
    slow_store: tuple[ChunkStore, Slow], clock: ManualClock
) -> None:
    store, slow = slow_store
    assert slow.permits is not None
    (hasty,) = store.load([key_of(1)], HASTY)
    assert slow.opened.acquire(timeout=TIMEOUT)
    (patient,) = store.load([key_of(1)], ENDLESS)
    clock.advance(prompt_load.LEAST_DEADLINE_SECONDS)
    assert hasty.result(timeout=TIMEOUT) is None
    slow.permits.release(2)
    (kv,) = complete([patient])
    assert kv is not None
    assert same_kv(kv, chunk_kv(1))
    assert reads_of(slow, 1) == [0, 1]
    assert not slow.opened.acquire(blocking=False), "no second copy was opened"


def test_giving_up_is_each_prompts_own(slow_store: tuple[ChunkStore, Slow]) -> None:
    store, slow = slow_store
    assert slow.permits is not None
    store.bandwidths.note("slow", 1 << 40, 1.0)
    slow.permits.release(1)
    (first,) = store.load([key_of(1)], ENDLESS)
    given_up = first.result(timeout=TIMEOUT)
    assert isinstance(given_up, ArrivingKV)
    (second,) = store.load([key_of(1)], ENDLESS)
    kv = second.result(timeout=TIMEOUT)
    given_up.give_up()
    assert isinstance(kv, ArrivingKV)
    assert kv.layer(0) is not None, "who joins gets what is there"
    slow.permits.release(1)
    assert same_kv(complete([second])[0] or chunk_kv(9), chunk_kv(1))
    assert given_up.lost
    assert given_up.layer(1) is None


def test_what_nobody_wants_any_more_is_not_read_on(slow_store: tuple[ChunkStore, Slow]) -> None:
    store, slow = slow_store
    assert slow.permits is not None
    store.bandwidths.note("slow", 1 << 40, 1.0)
    slow.permits.release(1)
    futures = [store.load([key_of(1)], ENDLESS)[0] for _ in range(2)]
    for future in futures:
        kv = future.result(timeout=TIMEOUT)
        assert isinstance(kv, ArrivingKV)
        kv.give_up()
    slow.permits.release(100)
    wait_until(lambda: not store._loader._readings)
    assert store.tier_of(key_of(1)) == "slow"
    assert reads_of(slow, 1) == [0, 1]


def test_who_joins_keeps_its_own_deadline(
    slow_store: tuple[ChunkStore, Slow], clock: ManualClock
) -> None:
    store, slow = slow_store
    assert slow.permits is not None
    (patient,) = store.load([key_of(1)], ENDLESS)
    assert slow.opened.acquire(timeout=TIMEOUT)
    (hasty,) = store.load([key_of(1)], HASTY)
    clock.advance(prompt_load.LEAST_DEADLINE_SECONDS)
    assert hasty.result(timeout=TIMEOUT) is None
    slow.permits.release(2)
    (kv,) = complete([patient])
    assert kv is not None
    assert same_kv(kv, chunk_kv(1))


class FailingTier(HostTier):
    """Holds chunks whose second layer cannot be read."""

    def open(self, key: str) -> ChunkReader | None:
        kv = self.get(key)
        if kv is None:
            return None
        reader = ScriptedReader(0, [], fails=1)
        reader.kv, reader.layers, reader.tokens, reader.nbytes = (
            kv,
            len(kv.layers),
            kv.tokens,
            kv.nbytes,
        )
        return reader


@pytest.mark.parametrize("another", [True, False])
def test_where_a_copy_fails_another_tiers_goes_on(another: bool) -> None:
    recorder = Recorder()
    failing, slow = FailingTier(PLENTY, recorder.events, name="failing"), Slow(recorder)
    store = ChunkStore([HostTier(PLENTY, recorder.events), failing, slow], recorder.events)
    failing.put(key_of(1), chunk_kv(1))
    if another:
        slow.put(key_of(1), chunk_kv(1))
    for future in [store.load([key_of(1)], ENDLESS)[0] for _ in range(2)]:
        kv = future.result(timeout=TIMEOUT)
        if another:
            found = whole(kv)
            assert found is not None
            assert same_kv(found, chunk_kv(1))
        elif isinstance(
            kv, ArrivingKV
        ):  # the first copy's speed is known, and its first layer was enough to begin
            awaited(kv, 1)
            assert kv.lost
        else:
            assert kv is None
    assert reads_of(slow, 1) == ([1] if another else []), "it goes on where the first copy failed"
    store.close()


def test_who_joins_between_two_copies_gets_the_layers_of_both(loader: LayerLoader) -> None:
    looks, found = threading.Event(), threading.Event()
    readers = {"near": ScriptedReader(1, [], fails=2), "far": ScriptedReader(1, [])}

    def find(tried: Set[str]) -> OpenedChunk:
        tier = "far" if tried else "near"
        if tried:
            looks.set()
            assert found.wait(TIMEOUT)
        return OpenedChunk(tier, readers[tier])

    first, second = ChunkLoad("key", find), ChunkLoad("key", find)
    loader.load([first], ENDLESS)
    assert looks.wait(TIMEOUT)
    loader.load([second], ENDLESS)
    found.set()
    for kv in complete([first.begun, second.begun]):
        assert kv is not None
        assert same_kv(kv, readers["far"].kv)


# --- reads that hang


def hanging(count: int) -> tuple[list[ScriptedReader], threading.Semaphore]:
    """Readers that hang until the semaphore lets them go."""
    permits = threading.Semaphore(0)
    readers = [ScriptedReader(number, []) for number in range(count)]
    for reader in readers:
        reader.permits = permits
    return readers, permits


def has_begun(reader: ScriptedReader) -> bool:
    return reader.asked >= 0


def threads_of_loaders() -> int:
    return sum(thread.name.startswith("kvlinker-layers") for thread in threading.enumerate())


def test_reads_that_hang_do_not_hold_up_others(
    loader: LayerLoader, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[LoadedChunk | None] = []
    readers, permits = hanging(module.THREADS)
    before = threads_of_loaders()
    for reader in readers:
        loader.load([chunk_of(reader, ended)], HASTY)
    wait_until(lambda: [reader.asked for reader in readers] == [0] * len(readers))
    clock.advance(HANGING)
    wait_for(ended, len(readers))
    assert ended == [None] * len(readers)
    sound = chunk_of(ScriptedReader(9, []), ended)
    loader.load([sound], ENDLESS)
    (kv,) = complete([sound.begun])
    assert kv is not None
    assert [reader.closed for reader in readers] == [0] * len(readers), "a read is under way"
    assert sum("does not return" in message for message in caplog.messages) == len(readers)
    permits.release(100)
    wait_until(lambda: all(reader.closed == 1 for reader in readers))
    wait_until(lambda: threads_of_loaders() <= before + module.THREADS)
    assert len(ended) == len(readers) + 1


def test_opening_may_hang_too(loader: LayerLoader, clock: ManualClock) -> None:
    ended: list[LoadedChunk | None] = []
    opening, returns = threading.Semaphore(0), threading.Event()
    reader = ScriptedReader(1, [])

    def opens() -> OpenedChunk:
        opening.release()
        assert returns.wait(TIMEOUT)
        return OpenedChunk("far", reader)

    for number in range(module.THREADS):
        loader.load([opened_by(opens, ended, key=str(number))], HASTY)
    for _ in range(module.THREADS):
        assert opening.acquire(timeout=TIMEOUT)
    clock.advance(HANGING)
    wait_for(ended, module.THREADS)
    wait_until(lambda: len(loader._abandoned) == module.THREADS)
    sound = chunk_of(ScriptedReader(9, []), ended)
    loader.load([sound], ENDLESS)
    assert complete([sound.begun]) != [None]
    returns.set()
    wait_until(lambda: reader.closed == module.THREADS)


def test_a_read_that_hangs_is_lost_to_all_who_wait_whatever_their_deadlines(
    loader: LayerLoader, clock: ManualClock
) -> None:
    ended: list[LoadedChunk | None] = []
    (reader,), permits = hanging(1)
    permits.release(1)
    chunks = [opened_by(lambda: OpenedChunk("far", reader), ended, key="shared") for _ in range(3)]
    for chunk in chunks:
        loader.load([chunk], ENDLESS)
    found = [arriving(chunk) for chunk in chunks]
    wait_until(lambda: reader.asked == 1)
    clock.advance(HANGING)
    assert [awaited(kv, 1) for kv in found] == [None] * 3
    assert all(kv.lost for kv in found)
    permits.release(9)
    wait_until(lambda: reader.closed == 1)
    assert ended == [None] * 3


def test_chunks_beside_one_that_hangs_are_read(loader: LayerLoader, clock: ManualClock) -> None:
    ended: list[LoadedChunk | None] = []
    (reader,), permits = hanging(1)
    sound = [ScriptedReader(number, []) for number in range(5, 8)]
    chunks = [chunk_of(reader, ended) for reader in (reader, *sound)]
    loader.load(chunks, ENDLESS)
    wait_for(ended, len(sound))
    wait_until(lambda: reader.asked == 0)
    clock.advance(HANGING)
    found = complete([chunk.begun for chunk in chunks])
    assert [kv is None for kv in found] == [True, False, False, False]
    permits.release(9)


def test_no_more_than_so_many_threads_are_replaced(
    loader: LayerLoader,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    replaced = 3
    monkeypatch.setattr(module, "MOST_ABANDONED", replaced)
    before = threads_of_loaders()
    ended: list[LoadedChunk | None] = []
    readers, permits = hanging(8)
    for number, reader in enumerate(readers):
        wanted = chunk_of(reader, ended)
        loader.load([wanted], HASTY)
        if number < module.THREADS + replaced:
            wait_until(partial(has_begun, reader))
        clock.advance(HANGING)
        assert wanted.begun.result(timeout=TIMEOUT) is None
    wait_until(lambda: "too many hang" in caplog.text)
    assert threads_of_loaders() - before <= module.THREADS + replaced
    permits.release(1000)
    wait_for(ended, len(readers))
    sound = chunk_of(ScriptedReader(99, []), ended)
    loader.load([sound], ENDLESS)
    assert complete([sound.begun]) != [None], "once they have returned, reading goes on"


def test_a_read_that_hangs_does_not_hold_up_the_end(
    loader: LayerLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.01)
    ended: list[LoadedChunk | None] = []
    (reader,), permits = hanging(1)
    loader.load([chunk_of(reader, ended)], ENDLESS)
    wait_until(lambda: reader.asked == 0)
    loader.close()
    assert reader.closed == 0, "the read is under way still"
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


def test_what_is_loaded_ahead_leaves_a_thread_to_who_needs_one(
    slow_store: tuple[ChunkStore, Slow],
) -> None:
    store, slow = slow_store
    assert slow.permits is not None
    for number in (3, 4):
        slow.put(key_of(number), chunk_kv(number))
    store.load_ahead([key_of(number) for number in (2, 3, 4)])
    for _ in range(3):
        assert slow.opened.acquire(timeout=TIMEOUT)
    wait_until(lambda: len(store._loader._threads) == 1)  # the other found nothing to do
    (needed,) = store.load([key_of(1)], ENDLESS)
    assert slow.opened.acquire(timeout=TIMEOUT)
    slow.permits.release(100)
    assert complete([needed]) != [None]


def test_what_is_needed_after_all_is_not_read_twice(slow_store: tuple[ChunkStore, Slow]) -> None:
    store, slow = slow_store
    assert slow.permits is not None
    store.load_ahead([key_of(1)])
    assert slow.opened.acquire(timeout=TIMEOUT)
    (needed,) = store.load([key_of(1)], ENDLESS)
    slow.permits.release(100)
    assert complete([needed]) != [None]
    assert reads_of(slow, 1) == [0, 1]


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
    wait_until(lambda: host.contains(key_of(0)))
    assert not host.contains(key_of(1))

    def comes_when_asked_for() -> bool:
        store.load_ahead([key_of(2)])
        return host.contains(key_of(2))

    wait_until(comes_when_asked_for)
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


def tier_of_kind(kind: str, folder: Path, recorder: Recorder) -> Tier:
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
    assert same_kv(
        ChunkKV(tuple(reader.read(layer) for layer in range(reader.layers)), reader.scores), kv
    )
    assert reader.nbytes == kv.nbytes
    reader.close()
    reader.close()
    (path,) = [
        path
        for path in (tmp_path / "tier").rglob("*")
        if path.is_file() and path.stat().st_size > kv.nbytes
    ]
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
    assert isinstance(reader, ResidentReader)
    assert [reader.read(layer) for layer in range(reader.layers)] == list(kv.layers)
    assert tier.open(key_of(4)) is None
