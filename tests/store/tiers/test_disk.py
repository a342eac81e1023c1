"""The disk tier where the medium fails, others share the folder, or threads meet. Its contract:
``test_tiers``."""

from __future__ import annotations

import errno
import math
import os
import random
import resource
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from kvlinker.base.events import ChunkDamaged
from kvlinker.store import ChunkKV, DiskTier, StoreError
from kvlinker.store.tiers import indexed_folder
from tests.store.store_chunks import Recorder, chunk_kv, key_of, run_threads, same_kv

BUDGET = 1 << 20


def open_tier(folder: Path, recorder: Recorder, budget: int = BUDGET) -> DiskTier:
    return DiskTier(folder, budget, recorder.events)


def file_of(folder: Path, number: int) -> Path:
    return folder / key_of(number)[:2] / f"{key_of(number)}.safetensors"


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def tier(tmp_path: Path, recorder: Recorder) -> DiskTier:
    return open_tier(tmp_path, recorder)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def replace(path: Path) -> None:
    path.write_text("not a safetensors file")


@pytest.mark.parametrize("harm", [truncate, empty, flip, replace])
def test_a_damaged_file_is_a_miss_is_removed_and_told(
    tmp_path: Path, recorder: Recorder, tier: DiskTier, harm
) -> None:
    tier.put(key_of(1), chunk_kv(1))
    tier.put(key_of(2), chunk_kv(2))
    harm(file_of(tmp_path, 1))
    assert tier.get(key_of(1)) is None
    assert [(event.tier, event.key) for event in recorder.of(ChunkDamaged)] == [("disk", key_of(1))]
    assert files_in(tmp_path) == [f"{key_of(2)}.safetensors"]
    assert tier.keys() == (key_of(2),)
    assert tier.used_bytes == file_of(tmp_path, 2).stat().st_size
    assert tier.put(key_of(1), chunk_kv(1))
    kv = tier.get(key_of(1))
    assert kv is not None
    assert same_kv(kv, chunk_kv(1))


def test_what_cannot_be_read_is_damage_but_a_lack_of_handles_is_not(
    recorder: Recorder, tier: DiskTier
) -> None:
    for code in (errno.EMFILE, errno.EIO, errno.EACCES):
        recorder.seen.clear()
        tier.put(key_of(1), chunk_kv(1))
        with mock.patch(
            "kvlinker.store.tiers.disk.read_chunk_file",
            side_effect=OSError(code, os.strerror(code)),
        ):
            assert tier.get(key_of(1)) is None
        assert (
            bool(recorder.of(ChunkDamaged))
            == (not tier.contains(key_of(1)))
            == (code != errno.EMFILE)
        )


def test_check_removes_and_reports_what_is_damaged(
    tmp_path: Path, recorder: Recorder, tier: DiskTier
) -> None:
    for number in range(4):
        tier.put(key_of(number), chunk_kv(number))
    before = tier.keys()
    flip(file_of(tmp_path, 2))
    result = tier.check()
    assert (result.name, result.checked) == ("disk", 4)
    assert [damage.key for damage in result.damaged] == [key_of(2)]
    assert list(result.damaged) == recorder.of(ChunkDamaged)
    assert tier.keys() == tuple(key for key in before if key != key_of(2))


def test_leftovers_of_a_crash_go_and_strangers_files_stay(
    tmp_path: Path, recorder: Recorder, tier: DiskTier
) -> None:
    tier.put(key_of(1), chunk_kv(1))
    folder = file_of(tmp_path, 1).parent
    leftover = folder / f"{key_of(1)}abc.tmp"
    leftover.write_bytes(b"half a chunk")
    os.utime(leftover, (time.time() - 3600,) * 2)
    strangers = ["notes.safetensors", "README", "being written by another process.tmp"]
    for name in strangers:
        (folder / name).write_text("mine")
    elsewhere = tmp_path / "00" / f"{key_of(1)}.safetensors"
    elsewhere.parent.mkdir()
    elsewhere.write_text("right name, wrong folder")
    reopened = open_tier(tmp_path, recorder)
    assert reopened.keys() == (key_of(1),)
    assert reopened.check().checked == 1
    assert files_in(tmp_path) == sorted([*strangers, elsewhere.name, f"{key_of(1)}.safetensors"])


def test_no_room_on_the_device_is_no_error(
    tmp_path: Path, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """Writes beyond RLIMIT_FSIZE fail in the middle of the file, as on a full device."""
    tier = open_tier(tmp_path, recorder, 1 << 24)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        assert not tier.put(key_of(1), chunk_kv(1, tokens=1 << 15))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "was not written" in caplog.text
    assert files_in(tmp_path) == []
    assert tier.used_bytes == 0
    assert tier.get(key_of(1)) is None
    assert tier.put(key_of(1), chunk_kv(1, tokens=1 << 15))


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path, tier: DiskTier) -> None:
    file_of(tmp_path, 1).parent.write_text("a file where the folder should be")
    assert not tier.put(key_of(1), chunk_kv(1))
    assert tier.get(key_of(1)) is None
    assert not tier.contains(key_of(1))
    assert len(tier.check().damaged) == 1
    assert tier.check().damaged == ()
    assert tier.put(key_of(1), chunk_kv(1))


def put_a_folder(path: Path) -> None:
    path.mkdir()


def put_a_full_folder(path: Path) -> None:
    path.mkdir()
    (path / "notes").write_text("somebody's")


def put_a_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("harm", [put_a_folder, put_a_full_folder, put_a_link, os.mkfifo])
@pytest.mark.parametrize("way", ["get", "put", "check", "reopen"])
def test_what_is_no_file_gives_way(
    tmp_path: Path, recorder: Recorder, tier: DiskTier, harm, way: str
) -> None:
    tier.put(key_of(1), chunk_kv(1))
    file_of(tmp_path, 1).unlink()
    harm(file_of(tmp_path, 1))
    if way == "reopen":
        tier = open_tier(tmp_path, recorder)
    elif way == "get":
        assert tier.get(key_of(1)) is None
    elif way == "check":
        assert [damage.key for damage in tier.check().damaged] == [key_of(1)]
        assert not file_of(tmp_path, 1).exists()
    else:
        tier.delete(key_of(1))
    assert not tier.contains(key_of(1))
    assert tier.put(key_of(1), chunk_kv(1))
    kv = tier.get(key_of(1))
    assert kv is not None
    assert same_kv(kv, chunk_kv(1))
    assert tier.check().damaged == ()
    notes = [path.read_text() for path in tmp_path.rglob("notes")]
    assert notes == (["somebody's"] if harm is put_a_full_folder else [])


def test_failed_writes_free_the_room_that_they_had_reserved(
    tmp_path: Path, recorder: Recorder
) -> None:
    tier = open_tier(tmp_path, recorder, 5000)
    for _ in range(10):
        with mock.patch(
            "kvlinker.store.tiers.disk.write_chunk_file", side_effect=OSError(errno.ENOSPC, "full")
        ):
            assert not tier.put(key_of(1), chunk_kv(1))
        with mock.patch("os.replace", side_effect=OSError(errno.EROFS, "read-only")):
            assert not tier.put(key_of(2), chunk_kv(2))
    assert tier.put(key_of(3), chunk_kv(3))
    assert tier.put(key_of(4), chunk_kv(4))
    assert len(tier) == 2
    assert files_in(tmp_path) == sorted(f"{key_of(number)}.safetensors" for number in (3, 4))


def test_room_is_made_before_the_file_is_written(tmp_path: Path, recorder: Recorder) -> None:
    tier = open_tier(tmp_path, recorder)
    for number in (1, 2):
        tier.put(key_of(number), chunk_kv(number))
    tier = open_tier(tmp_path, recorder, tier.used_bytes)
    present = []
    with mock.patch(
        "kvlinker.store.tiers.disk.write_chunk_file",
        side_effect=lambda *_: present.extend(files_in(tmp_path)),
    ):
        tier.put(key_of(3), chunk_kv(3))
    assert [name for name in present if not name.endswith(".tmp")] == [f"{key_of(2)}.safetensors"]


def test_a_file_is_on_the_disk_before_it_is_in_its_place(tier: DiskTier) -> None:
    steps = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        steps.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def noted_replace(*paths: Path) -> None:
        steps.append("rename")
        replace(*paths)

    with mock.patch("os.fsync", noted_fsync), mock.patch("os.replace", noted_replace):
        tier.put(key_of(1), chunk_kv(1))
    file, rename, folder = steps
    assert file.endswith(".tmp")
    assert rename == "rename"
    assert folder == key_of(1)[:2]


def test_a_folder_that_cannot_be_used_is_an_error_that_names_it(
    tmp_path: Path, recorder: Recorder
) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(StoreError, match=str(path)):
        open_tier(path, recorder)


def test_caller_mistakes_are_told(tier: DiskTier) -> None:
    for key in ("../../etc/passwd", "abc", key_of(1).upper(), key_of(1) + "\n"):
        with pytest.raises(ValueError, match="not a chunk key"):
            tier.put(key, chunk_kv(1))
        with pytest.raises(ValueError, match="not a chunk key"):
            tier.get(key)
    with pytest.raises(ValueError, match="float64"):
        tier.put(key_of(1), chunk_kv(1, dtype=torch.float64))


def test_two_tiers_on_one_folder(tmp_path: Path, recorder: Recorder, tier: DiskTier) -> None:
    other = open_tier(tmp_path, Recorder())
    other.put(key_of(1), chunk_kv(1))
    kv = tier.get(key_of(1))
    assert kv is not None
    assert same_kv(kv, chunk_kv(1))
    assert tier.used_bytes == other.used_bytes == tier.nbytes(key_of(1))
    other.delete(key_of(1))
    assert tier.get(key_of(1)) is None
    assert tier.used_bytes == 0
    tier.put(key_of(2), chunk_kv(2))
    assert other.contains(key_of(2))
    other.delete(key_of(2))
    assert tier.put(key_of(2), chunk_kv(2)), "what another process removed is written again"
    assert file_of(tmp_path, 2).exists()


def test_what_another_process_wrote_counts_against_the_budget(
    tmp_path: Path, recorder: Recorder
) -> None:
    writer = open_tier(tmp_path, Recorder())
    writer.put(key_of(1), chunk_kv(1))
    writer.put(key_of(9), chunk_kv(9, tokens=200))
    size = writer.nbytes(key_of(1)) or 0
    small = open_tier(tmp_path / "own", recorder, size * 3 // 2)
    small.put(key_of(2), chunk_kv(2))
    file_of(tmp_path, 1).rename(tmp_path / "own" / "arriving")
    for number in (1, 9):
        file_of(tmp_path / "own", number).parent.mkdir(exist_ok=True)
    (tmp_path / "own" / "arriving").rename(file_of(tmp_path / "own", 1))
    file_of(tmp_path, 9).rename(file_of(tmp_path / "own", 9))
    assert small.contains(key_of(1))
    assert small.keys() == (key_of(1),)
    assert small.used_bytes == size
    assert not small.contains(key_of(9)), "larger than the whole budget"
    assert small.keys() == (key_of(1),)


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tiers look at what others did in their folder whenever they write."""
    monkeypatch.setattr(indexed_folder, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(indexed_folder, "LOOK_SHARE", math.inf)


@pytest.mark.usefixtures("watchful")
def test_the_budget_is_that_of_all_processes_together(tmp_path: Path, recorder: Recorder) -> None:
    size = put_size(tmp_path / "measured", recorder)
    folder = tmp_path / "shared"
    first, second = (open_tier(folder, recorder, 4 * size) for _ in range(2))
    for number in range(4):
        assert first.put(key_of(number), chunk_kv(number))
    for number in range(10, 14):
        assert second.put(key_of(number), chunk_kv(number))
        assert sum(path.stat().st_size for path in folder.rglob("*.safetensors")) <= 4 * size
    assert first.used_bytes == 4 * size
    assert first.put(key_of(20), chunk_kv(20))
    assert set(first.keys()) == {key_of(number) for number in (11, 12, 13, 20)}, (
        "what the other evicted counts no more"
    )
    assert len(files_in(folder)) == 4


def test_much_written_is_reason_to_look(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed_folder, "LOOK_SHARE", math.inf)
    size = put_size(tmp_path / "measured", recorder)
    folder = tmp_path / "shared"
    tiers = [open_tier(folder, recorder, 20 * size) for _ in range(3)]
    for number in range(60):
        assert tiers[number % 3].put(key_of(number), chunk_kv(number))
        assert len(files_in(folder)) <= 23


@pytest.mark.usefixtures("watchful")
def test_what_a_killed_process_left_goes_while_others_run(tmp_path: Path, tier: DiskTier) -> None:
    """One that is started again at once finds what it left too young to go."""
    tier.put(key_of(1), chunk_kv(1))
    left, written = (file_of(tmp_path, 1).with_suffix(f".{each}.tmp") for each in (1, 2))
    for path in (left, written):
        path.write_bytes(b"half a chunk")
    os.utime(left, (time.time() - 3600,) * 2)
    tier.put(key_of(2), chunk_kv(2))
    assert not left.exists()
    assert written.exists()


@pytest.mark.usefixtures("watchful")
def test_uses_by_other_processes_count(tmp_path: Path, recorder: Recorder) -> None:
    size = put_size(tmp_path / "measured", recorder)
    folder = tmp_path / "shared"
    first, second = (open_tier(folder, recorder, 3 * size) for _ in range(2))
    for number in range(3):
        assert first.put(key_of(number), chunk_kv(number))
    assert second.get(key_of(0)) is not None
    assert first.put(key_of(3), chunk_kv(3))
    assert set(first.keys()) == {key_of(number) for number in (0, 2, 3)}


@pytest.mark.usefixtures("watchful")
def test_a_processs_own_uses_keep_their_order(tmp_path: Path, recorder: Recorder) -> None:
    """Also those that were noted without the file."""
    size = put_size(tmp_path / "measured", recorder)
    tier = open_tier(tmp_path / "own", recorder, 3 * size)
    for number in range(3):
        assert tier.put(key_of(number), chunk_kv(number))
    tier.note_use(key_of(0), 1.0)
    assert tier.put(key_of(3), chunk_kv(3))
    assert set(tier.keys()) == {key_of(number) for number in (0, 2, 3)}


def test_a_chunk_that_another_process_evicts_while_it_is_read_is_whole(
    tmp_path: Path, recorder: Recorder
) -> None:
    first, second = (open_tier(tmp_path, recorder) for _ in range(2))
    first.put(key_of(1), chunk_kv(1))
    reader = second.open(key_of(1))
    assert reader is not None
    assert first.delete(key_of(1))
    read = ChunkKV(tuple(reader.read(layer) for layer in range(reader.layers)), reader.scores)
    reader.close()
    assert same_kv(read, chunk_kv(1))
    assert second.get(key_of(1)) is None
    assert recorder.of(ChunkDamaged) == []


def test_a_delete_while_reading_is_a_miss_without_damage(
    recorder: Recorder, tier: DiskTier
) -> None:
    def read(*_: object) -> None:
        tier.delete(key_of(1))
        raise FileNotFoundError

    tier.put(key_of(1), chunk_kv(1))
    with mock.patch("kvlinker.store.tiers.disk.read_chunk_file", side_effect=read):
        assert tier.get(key_of(1)) is None
    assert recorder.of(ChunkDamaged) == []


def test_a_reader_does_not_wait_for_a_writer(tier: DiskTier) -> None:
    tier.put(key_of(1), chunk_kv(1))
    seen: list[object] = []

    def write(*_: object) -> None:
        run_threads(
            lambda: seen.append(tier.get(key_of(1))), lambda: seen.append(tier.nbytes(key_of(2)))
        )

    with mock.patch("kvlinker.store.tiers.disk.write_chunk_file", side_effect=write):
        tier.put(key_of(2), chunk_kv(2))
    assert len(seen) == 2
    assert None in seen


def test_threads_meet_without_harm(tmp_path: Path, recorder: Recorder) -> None:
    tier = open_tier(tmp_path, recorder, 6000)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            number = rng.randrange(8)
            action = rng.choice(("put", "get", "get", "delete"))
            if action == "put":
                tier.put(key_of(number), chunk_kv(number))
            elif action == "delete":
                tier.delete(key_of(number))
            elif (kv := tier.get(key_of(number))) is not None:
                assert same_kv(kv, chunk_kv(number))
            assert tier.used_bytes <= 6000

    with mock.patch("os.fsync"):
        run_threads(*(lambda seed=seed: work(seed) for seed in range(4)))
    assert files_in(tmp_path) == sorted(f"{key}.safetensors" for key in tier.keys())  # noqa: SIM118
    assert tier.used_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert tier.check().damaged == ()


def test_room_for_another_processs_file_is_made_as_for_ones_own(
    tmp_path: Path, recorder: Recorder
) -> None:
    size = put_size(tmp_path / "measured", recorder)
    tier = open_tier(tmp_path / "tier", recorder, 3 * size)
    for number in range(3):
        assert tier.put(key_of(number), chunk_kv(number))
    tier.set_pinned({key_of(0)})
    assert tier.make_room(key_of(9), size)
    assert set(tier.keys()) == {key_of(0), key_of(2)}
    assert not tier.make_room(key_of(9), 3 * size)
    assert set(tier.keys()) == {key_of(0), key_of(2)}


def test_a_tier_that_does_not_yield_leaves_a_full_disk_to_others(
    tmp_path: Path, recorder: Recorder
) -> None:
    tier = DiskTier(tmp_path, BUDGET, recorder.events, yields=False)
    assert tier.put(key_of(0), chunk_kv(0))
    full = OSError(errno.ENOSPC, "no space left")
    with mock.patch.object(tier._folder, "shortage", return_value=BUDGET):
        assert tier.put(key_of(1), chunk_kv(1))
        with mock.patch.object(tier._folder, "write", side_effect=full):
            assert not tier.put(key_of(2), chunk_kv(2))
    assert set(tier.keys()) == {key_of(0), key_of(1)}


def put_size(folder: Path, recorder: Recorder) -> int:
    """Bytes that a chunk takes."""
    tier = open_tier(folder, recorder)
    assert tier.put(key_of(0), chunk_kv(0))
    return tier.used_bytes
