"""The device tier: what is used moves up, pressure takes it down, and nothing is written from it.

The "meta" device stands for one with memory of its own: what lies there is never what the host has.
"""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.events import ChunkEvicted, ChunkLookup
from kvlinker.base.types.chunk_scores import ChunkScores, Contextualization
from kvlinker.store import ChunkKV, ChunkStore, DeviceTier, HostTier, TierUsage, open_store
from kvlinker.store.loading.bandwidths import LoadTime
from kvlinker.store.loading.prompt_load import Urgency
from tests.store.memory.fake_device import FakeDevice
from tests.store.store_chunks import Recorder, chunk_kv, key_of, run_threads, same_kv, sized

PLENTY = 1 << 20
SIZE = chunk_kv(0).nbytes
CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def store_with(
    recorder: Recorder, device_bytes: int = PLENTY, device: torch.device = CPU
) -> ChunkStore:
    device_copies = DeviceTier(device_bytes, device, recorder.events)
    return ChunkStore([HostTier(PLENTY, recorder.events)], recorder.events, device=device_copies)


def devices_of(kv: ChunkKV | None) -> set[str]:
    assert kv is not None
    return {heads.device.type for layer in kv.layers for heads in (layer.key, layer.value)}


def test_chunks_move_up_on_use(recorder: Recorder) -> None:
    store = store_with(recorder, device=META)
    store.put(key_of(1), chunk_kv(1))
    assert store.tier_of(key_of(1)) == "host"
    assert devices_of(store.get(key_of(1))) == {"meta"}
    assert store.tier_of(key_of(1)) == "device"
    assert devices_of(store.get_resident(key_of(1))) == {"meta"}
    (loaded,) = store.load([key_of(1)], Urgency())
    kv = loaded.result(timeout=0)
    assert isinstance(kv, ChunkKV)
    assert devices_of(kv) == {"meta"}
    assert [lookup.tier for lookup in recorder.of(ChunkLookup)] == ["host", "device", "device"]
    assert store.usage() == (
        TierUsage("device", SIZE, PLENTY, 1),
        TierUsage("host", SIZE, PLENTY, 1),
    )
    assert store.usage_of({key_of(1)}) == store.usage()


def test_what_moves_up_is_there_before_anybody_gets_it(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is copied on a stream of its own, by the thread that loads it."""
    lane = FakeDevice()
    monkeypatch.setattr("kvlinker.store.tiers.device.lane_to", lambda _: lane)
    store = store_with(recorder)
    store.put(key_of(1), chunk_kv(1))
    for _ in range(2):
        kv = store.get(key_of(1))
        assert same_kv(kv, chunk_kv(1))
        assert kv is not None
        assert all(lane.holds(layer.key) for layer in kv.layers)
    assert lane.log == ["launch 0", "wait 0"]


def test_what_lies_on_the_device_takes_no_time_to_load(recorder: Recorder) -> None:
    copies = DeviceTier(PLENTY, CPU, recorder.events)
    slow = HostTier(PLENTY, recorder.events, name="slow")
    store = ChunkStore([HostTier(0, recorder.events), slow], recorder.events, device=copies)
    slow.put(key_of(1), chunk_kv(1))
    assert store.load_time([key_of(1)]) is None
    copies.put(key_of(1), chunk_kv(1))
    assert store.load_time([key_of(1), key_of(1)]) == LoadTime()


def test_pressure_takes_chunks_down_and_loses_none(recorder: Recorder) -> None:
    store = store_with(recorder, device_bytes=2 * SIZE)
    for number in range(3):
        store.put(key_of(number), chunk_kv(number))
        store.get(key_of(number))
    assert recorder.of(ChunkEvicted) == [ChunkEvicted("device", SIZE)]
    assert [store.tier_of(key_of(number)) for number in range(3)] == ["host", "device", "device"]
    for number in range(3):
        kv = store.get(key_of(number))
        assert kv is not None
        assert same_kv(kv, chunk_kv(number))


def test_what_has_no_room_on_the_device_is_taken_from_the_host(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_with(recorder, device_bytes=SIZE - 1, device=META)
    store.put(key_of(1), chunk_kv(1))
    assert devices_of(store.get(key_of(1))) == {"cpu"}
    store = store_with(recorder, device=META)
    store.put(key_of(1), chunk_kv(1))
    with mock.patch.object(
        torch.Tensor, "to", side_effect=torch.OutOfMemoryError("no memory left")
    ):
        assert devices_of(store.get(key_of(1))) == {"cpu"}
    assert "no memory left" in caplog.text
    assert devices_of(store.get(key_of(1))) == {"meta"}


def test_slower_tiers_are_written_from_the_host(tmp_path: Path, recorder: Recorder) -> None:
    def opened(host_bytes: int) -> ChunkStore:
        settings = sized(tmp_path, host_bytes, PLENTY, device_memory=PLENTY)
        return open_store(settings, recorder.events, device=META)

    store = opened(PLENTY)
    store.put(key_of(1), chunk_kv(1))
    assert devices_of(store.get(key_of(1))) == {"meta"}
    store.close()
    store = opened(0)
    kv = store.get(key_of(1))
    assert kv is not None
    assert same_kv(kv, chunk_kv(1))
    store.close()


def test_deleting_removes_the_copy(recorder: Recorder) -> None:
    store = store_with(recorder)
    store.put(key_of(1), chunk_kv(1))
    store.get(key_of(1))
    store.delete(key_of(1))
    assert store.get(key_of(1)) is None
    assert store.keys() == frozenset()


def test_a_copy_on_its_way_up_does_not_undo_a_delete(recorder: Recorder) -> None:
    store = store_with(recorder)
    store.put(key_of(1), chunk_kv(1))
    copying, deleted = threading.Event(), threading.Event()
    copied = DeviceTier.copied

    def held_up(tier: DeviceTier, kv: ChunkKV) -> ChunkKV | None:
        copying.set()
        assert deleted.wait(10)
        return copied(tier, kv)

    def delete() -> None:
        assert copying.wait(10)
        store.delete(key_of(1))
        deleted.set()

    with mock.patch.object(DeviceTier, "copied", held_up):
        run_threads(lambda: store.get(key_of(1)), delete)
    assert store.keys() == frozenset()


def test_a_copy_that_kv_with_scores_replaces_does_not_come_back(recorder: Recorder) -> None:
    """Whoever looks for it meanwhile finds it on the device, or nowhere."""
    store, key = store_with(recorder), key_of(1)
    store.put(key, chunk_kv(1))
    store.get(key)
    looking, deleted = threading.Event(), threading.Event()
    reader = threading.Thread(target=store.get, args=(key,))
    get, delete = DeviceTier.get, HostTier.delete

    def held_up(tier: DeviceTier, key: str) -> ChunkKV | None:
        if threading.current_thread() is reader:
            looking.set()
            assert deleted.wait(10)
        return get(tier, key)

    def delete_first(tier: HostTier, key: str) -> bool:
        gone = delete(tier, key)
        deleted.set()
        reader.join(0.5)  # it waits for ``put`` if it has a copy for the device
        return gone

    ones = np.ones(3, np.float32)
    scores = ChunkScores(Contextualization(3, 1.0), ones, ones, ones)
    with (
        mock.patch.object(DeviceTier, "get", held_up),
        mock.patch.object(HostTier, "delete", delete_first),
    ):
        reader.start()
        assert looking.wait(10)
        store.put(key, replace(chunk_kv(1), scores=scores))
        reader.join()
    kv = store.get(key)
    assert kv is not None
    assert kv.scores is not None


def test_pins_are_for_the_tiers_behind(recorder: Recorder) -> None:
    store = store_with(recorder, device_bytes=SIZE)
    store.set_pinned({key_of(0)})
    for number in range(2):
        store.put(key_of(number), chunk_kv(number))
        store.get(key_of(number))
    assert [store.tier_of(key_of(number)) for number in range(2)] == ["host", "device"]


def budgets(
    tmp_path: Path, device: torch.device | None, device_memory: int | None
) -> dict[str, int]:
    """The budgets of a store's tiers where a model runs on the device."""
    settings = sized(
        tmp_path, PLENTY, 0, **({} if device_memory is None else {"device_memory": device_memory})
    )
    with closing(open_store(settings, Recorder().events, device=device)) as store:
        return {usage.name: usage.budget_bytes for usage in store.usage()}


def test_by_default_a_tenth_of_what_is_free_on_cuda(tmp_path: Path) -> None:
    cuda, host = torch.device("cuda"), {"host": PLENTY}
    with mock.patch("torch.cuda.mem_get_info", return_value=(10_000, 20_000)):
        assert budgets(tmp_path, cuda, None) == {"device": 1000} | host
    assert budgets(tmp_path, cuda, 500) == {"device": 500} | host
    assert budgets(tmp_path, CPU, None) == host
    assert budgets(tmp_path, CPU, 0) == host
    assert budgets(tmp_path, cuda, 0) == host
    assert budgets(tmp_path, None, 1000) == host


def test_a_budget_where_the_devices_memory_is_the_hosts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"device_memory is 1,000 bytes.*set host_memory"):
        budgets(tmp_path, CPU, 1000)
