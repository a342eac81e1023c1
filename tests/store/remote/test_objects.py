"""The object tier over fsspec's local and memory file systems: a tier like the others, shared by
several servers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from kvlinker.base.events import ChunkDamaged, ChunkEvicted, TierUnavailable
from kvlinker.store import StoreError
from kvlinker.store.format.chunk_file import encode_chunk
from kvlinker.store.remote.blob_tier import BlobTier
from kvlinker.store.remote.objects import ObjectMedium, object_tier
from tests.properties import examples
from tests.store.store_chunks import Recorder, chunk_kv, key_of, run_threads, same_kv
from tests.store.tiers.test_tiers import KV, TierMachine
from tests.waiting import PATIENCE, wait_until

PLENTY = 1 << 30


def blob_size(number: int) -> int:
    return encode_chunk(key_of(number), KV[number]).nbytes


class ObjectMachine(TierMachine):
    @initialize(budget=st.integers(0, 9000), protocol=st.sampled_from(["file", "memory"]))
    def open(self, budget: int, protocol: str) -> None:
        self.folder = tempfile.mkdtemp()
        self.url = f"{protocol}://{self.folder}"
        medium = ObjectMedium(self.url, budget, timeout=PATIENCE)
        self.tier = BlobTier("object", medium, self.recorder.events, answer_seconds=PATIENCE)

    def size(self, number: int) -> int:
        return blob_size(number)

    @invariant()
    def objects_are_what_is_counted(self) -> None:
        if hasattr(self, "tier"):
            files, root = fsspec.url_to_fs(self.url)
            sizes = {Path(path).stem: files.size(path) for path in files.find(root)}
            assert sizes == {key_of(number): size for number, size in self.model.items()}
            assert self.recorder.of(TierUnavailable) == []

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            shutil.rmtree(self.folder)


TestObjectTier = ObjectMachine.TestCase
TestObjectTier.settings = examples(30, core=10, stateful_step_count=25, deadline=None)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}://{tmp_path}/chunks"


def test_big_chunks_come_back_bit_for_bit(url: str, recorder: Recorder) -> None:
    kv = chunk_kv(1, tokens=100_000)
    tier = object_tier(url, PLENTY, recorder.events)
    assert tier.put(key_of(1), kv)
    assert same_kv(tier.get(key_of(1)), kv)


def test_a_second_server_finds_what_the_first_one_put(url: str, recorder: Recorder) -> None:
    first = object_tier(url, PLENTY, recorder.events)
    second = object_tier(url, PLENTY, recorder.events)
    first.put(key_of(1), KV[1])
    assert same_kv(second.get(key_of(1)), KV[1])
    assert (second.used_bytes, len(second)) == (blob_size(1), 1)
    second.delete(key_of(1))
    assert first.get(key_of(1)) is None
    assert (first.used_bytes, len(first)) == (0, 0)
    assert recorder.of(ChunkDamaged) == []


def test_a_new_server_lists_what_is_there_in_the_order_of_writing(
    tmp_path: Path, recorder: Recorder
) -> None:
    url = f"file://{tmp_path}"
    first = object_tier(url, PLENTY, recorder.events)
    for age, number in enumerate((3, 1, 2)):
        first.put(key_of(number), KV[number])
        (file,) = tmp_path.glob(f"??/{key_of(number)}.safetensors")
        os.utime(file, (1000 + age, 1000 + age))
    second = object_tier(url, blob_size(1) + blob_size(2), recorder.events)
    assert second.keys() == (key_of(1), key_of(2))
    assert recorder.of(ChunkEvicted) == [ChunkEvicted("object", blob_size(3))]
    assert first.get(key_of(3)) is None


def test_listing_again_finds_what_others_did(tmp_path: Path, recorder: Recorder) -> None:
    first = object_tier(f"file://{tmp_path}", PLENTY, recorder.events)
    medium = ObjectMedium(
        f"file://{tmp_path}", blob_size(1) + blob_size(2), timeout=5, listing_seconds=0.05
    )
    second = BlobTier("object", medium, recorder.events)
    for number in (1, 2):
        first.put(key_of(number), KV[number])
    assert first.get(key_of(1)) is not None
    wait_until(lambda: len(second) == 2)
    second.put(key_of(3), KV[3])
    wait_until(lambda: second.used_bytes <= second.budget_bytes)
    assert second.contains(key_of(3))
    assert (
        sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) <= second.budget_bytes
    )


def test_strangers_objects_stay_and_leftovers_go(tmp_path: Path, recorder: Recorder) -> None:
    key = key_of(1)
    strangers = ["notes.txt", f"{key[:2]}/{key}", f"{key[:2]}/{key}.json", f"zz/{key}.safetensors"]
    old, young = (tmp_path / key[:2] / f"{key}.{letter * 32}.tmp" for letter in "ab")
    for path in [*(tmp_path / name for name in strangers), old, young]:
        path.parent.mkdir(exist_ok=True)
        path.write_text("here")
    os.utime(old, (1000, 1000))
    tier = object_tier(f"file://{tmp_path}", blob_size(1), recorder.events)
    assert len(tier) == 0
    for number in (0, 1, 2):
        tier.put(key_of(number), KV[number])
    tier.check()
    assert all((tmp_path / name).read_text() == "here" for name in strangers)
    assert (old.exists(), young.exists()) == (False, True)


@pytest.mark.parametrize(
    "harm", [lambda data: b"garbage", lambda data: data[:-1], lambda data: data[:100] + data[101:]]
)
def test_damage_is_a_miss_is_removed_and_told(tmp_path: Path, recorder: Recorder, harm) -> None:
    tier = object_tier(f"file://{tmp_path}", PLENTY, recorder.events)
    tier.put(key_of(1), KV[1])
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(harm(file.read_bytes()))
    assert tier.get(key_of(1)) is None
    assert [event.key for event in recorder.of(ChunkDamaged)] == [key_of(1)]
    assert not file.exists()
    assert tier.put(key_of(1), KV[1])
    assert same_kv(tier.get(key_of(1)), KV[1])


def test_a_place_that_cannot_be_written_is_no_error(
    tmp_path: Path, recorder: Recorder, caplog
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    tier = object_tier(f"file://{blocked}/below", PLENTY, recorder.events)
    assert not tier.put(key_of(1), KV[1])
    assert tier.get(key_of(1)) is None
    assert recorder.of(TierUnavailable)
    assert len(caplog.messages) == 1
    tier.close()


def test_a_file_system_that_hangs_costs_one_timeout(
    tmp_path: Path,
    recorder: Recorder,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    medium = ObjectMedium(f"file://{tmp_path}", PLENTY, timeout=PATIENCE)
    tier = BlobTier("object", medium, recorder.events, answer_seconds=1, pause_seconds=0.1)
    for number in (1, 2):
        tier.put(key_of(number), KV[number])
    (file,) = tmp_path.glob(f"??/{key_of(1)}.safetensors")
    file.unlink()
    os.mkfifo(file)  # reading it waits for somebody who writes
    goes_on = threading.Event()
    reach = medium.open
    monkeypatch.setattr(
        medium, "open", lambda: goes_on.wait(PATIENCE) and reach()
    )  # with which it is tried
    assert tier.get(key_of(1)) is None
    assert tier.get(key_of(2)) is None
    assert len(recorder.own(TierUnavailable)) == len(caplog.messages) == 1
    goes_on.set()
    wait_until(lambda: tier.get(key_of(2)) is not None)
    file.write_bytes(b"")  # lets the reader go
    tier.close()


def test_a_check_waits_for_a_long_list(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large bucket takes longer to list than a request would wait."""
    medium = ObjectMedium(f"file://{tmp_path}", PLENTY, timeout=PATIENCE)
    tier = BlobTier("object", medium, recorder.events, answer_seconds=0.2)
    tier.put(key_of(1), KV[1])
    find = medium._find

    def slowly() -> dict[str, Any]:
        time.sleep(0.5)
        return find()

    monkeypatch.setattr(medium, "_find", slowly)
    checked = tier.check()
    assert (checked.checked, checked.reachable) == (1, True)

    def gone() -> None:
        raise OSError("gone")

    monkeypatch.setattr(medium, "_find", gone)
    checked = tier.check()
    assert (checked.checked, checked.reachable) == (0, False)
    tier.close()


def test_threads_meet_without_harm(url: str, recorder: Recorder) -> None:
    tiers = [object_tier(url, 3 * blob_size(5), recorder.events) for _ in range(2)]

    def work(tier: BlobTier, seed: int) -> None:
        for turn in range(50):
            number = (turn * 5 + seed) % 6
            tier.put(key_of(number), KV[number])
            if (kv := tier.get(key_of((number + turn) % 6))) is not None:
                assert same_kv(kv, KV[(number + turn) % 6])
            if turn % 4 == 0:
                tier.delete(key_of(number))

    run_threads(
        *(lambda tier=tier, seed=seed: work(tier, seed) for seed, tier in enumerate(tiers * 2))
    )
    assert [*recorder.of(TierUnavailable), *recorder.of(ChunkDamaged)] == []


@pytest.mark.whole
def test_a_program_that_forgets_to_close_loses_nothing(tmp_path: Path) -> None:
    program = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
from tests.store.store_chunks import Recorder, chunk_kv, key_of, sized
from kvlinker.store import open_store
settings = sized(Path({str(tmp_path)!r}), 1 << 20, 0, object_url="file://{tmp_path}/objects")
store = open_store(settings, Recorder().events)
for number in range(5):
    store.put(key_of(number), chunk_kv(number))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 5


@pytest.mark.parametrize(
    "url", ["nosuchthing://user:se-cret@host/path", "s3-cret://x?secret=se-cret"]
)
def test_a_url_that_is_none_is_told_without_its_password(url: str) -> None:
    with pytest.raises(StoreError, match="s3://bucket/folder") as raised:
        object_tier(url, PLENTY, Recorder().events)
    assert "se-cret" not in str(raised.value)
