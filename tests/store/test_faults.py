"""Disks that are full or read-only, several processes on one folder, and clocks that jump: nothing
stops, all mends."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from unittest import mock

import pytest

from kvlinker.base.events import ChunkEvicted, Events
from kvlinker.store import Catalog, DiskTier, StoreError
from kvlinker.store.tiers.chunk_folder import SPARE_SHARE
from tests.store.crash_work import CONTENTS, State, check, chunk_of, kv_of, open_state, start, work
from tests.store.store_chunks import Recorder, chunk_kv, key_of, same_kv


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 12 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a small disk cannot be mounted here: that takes root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", folder], check=True)


def every_chunk_is_right(state: State) -> None:
    for number in range(CONTENTS):
        chunk = chunk_of(number)
        assert same_kv(state.engine.use(chunk, "anna"), kv_of(chunk))
    state.store.flush()


def create_many(state: State) -> list[str]:
    """Ids of those that were accepted."""
    ids = []
    for number in range(100):
        try:
            created = state.caches.create([str(number % CONTENTS)], tenant="anna").result()
        except StoreError:
            continue
        ids += [cache.id for cache in created]
    return ids


def lasts(folder: Path, ids: list[str]) -> None:
    """The context caches are there after a restart and repair."""
    check(folder, "--repair")
    result = check(folder)
    assert result.exit_code == 0, result.output
    with closing(open_state(folder)) as state:
        for cache_id in ids:
            assert state.caches.get(cache_id, tenant="anna").id == cache_id
        every_chunk_is_right(state)


def test_a_full_disk(small_disk: Path) -> None:
    with closing(open_state(small_disk)) as state:
        ids = create_many(state)[:3]
        filler = small_disk / "filler"
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(bytes(16 << 20))
        ids += create_many(state)
        every_chunk_is_right(state)
        for cache_id in ids:
            assert state.caches.get(cache_id, tenant="anna").id == cache_id
        filler.unlink()
        later = create_many(state)
        assert len(later) == 100
    lasts(small_disk, ids + later)


def test_a_start_on_a_full_disk(small_disk: Path) -> None:
    """It is refused with what to do, and harms nothing."""
    with closing(open_state(small_disk)) as state:
        ids = create_many(state)[:3]
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(16 << 20))
    with pytest.raises(StoreError, match=r"catalog\.sqlite failed: .*(Free some room|has room)"):
        open_state(small_disk)
    filler.unlink()
    lasts(small_disk, ids)


def test_chunk_files_leave_room_for_the_catalog(small_disk: Path) -> None:
    """However large their budget; what others need more, they give up."""
    spare = int(SPARE_SHARE * (12 << 20))
    catalog = Catalog(small_disk / "catalog.sqlite")
    recorder = Recorder()
    tier = DiskTier(small_disk / "chunks", 1 << 40, recorder.events)

    def free() -> int:
        disk = os.statvfs(small_disk)
        return disk.f_bavail * disk.f_frsize

    def used() -> int:
        return sum(path.stat().st_blocks * 512 for path in small_disk.rglob("*.safetensors"))

    for number in range(40):
        assert tier.put(key_of(number), chunk_kv(number, tokens=6000))  # half a megabyte
        assert free() >= spare - (1 << 16)
    assert tier.keys()[-1] == key_of(39)
    assert 10 < len(tier) < 25
    assert recorder.of(ChunkEvicted)
    assert not tier.put(key_of(99), chunk_kv(99, tokens=200_000)), "larger than the disk"
    assert len(tier) > 10, "nothing is given up for it"
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(16 << 20))
    assert free() == 0
    with suppress(StoreError):
        catalog.expire(0.0)
    tier.put(key_of(50), chunk_kv(50, tokens=6000))
    assert free() >= spare - (1 << 16)
    assert len(tier) > 5, "no more than needed is given up"
    catalog.expire(0.0)
    filler.unlink()
    assert tier.put(key_of(51), chunk_kv(51, tokens=6000))
    assert all(not result.damaged for result in (tier.check(),))
    catalog.close()


def test_a_disk_quota_that_the_file_system_does_not_tell(tmp_path: Path) -> None:
    recorder = Recorder()
    tier = DiskTier(tmp_path, 1 << 30, recorder.events)
    for number in range(4):
        assert tier.put(key_of(number), chunk_kv(number, tokens=100))
    with mock.patch("os.fsync", side_effect=OSError(errno.EDQUOT, "quota")):
        assert not tier.put(key_of(5), chunk_kv(5, tokens=100))
    assert tier.keys() == tuple(key_of(number) for number in (1, 2, 3))
    assert tier.put(key_of(5), chunk_kv(5, tokens=100))


def test_a_creation_that_the_catalog_refuses_leaves_nothing(tmp_path: Path) -> None:
    with closing(open_state(tmp_path)) as state:
        refusal = StoreError("The catalog is full.")
        with (
            mock.patch.object(state.catalog, "add", side_effect=refusal),
            pytest.raises(StoreError),
        ):
            state.caches.create(["1"], tenant="anna").result()
        state.store.flush()
        assert not state.store.keys()
        state.caches.create(["1"], tenant="anna").result()
        with (
            mock.patch.object(state.catalog, "add", side_effect=refusal),
            pytest.raises(StoreError),
        ):
            state.caches.create(["1"], tenant="anna").result()
        assert state.store.keys(), "another holds it"


def test_a_disk_that_becomes_read_only(tmp_path: Path, small_disk: Path) -> None:
    """That of the chunk files: no disk can become so while SQLite has a file open there."""
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "chunks").symlink_to(small_disk)
    with closing(open_state(folder)) as state:
        ids = create_many(state)
        state.store.flush()
        file = next(path for path in small_disk.rglob("*.safetensors"))
        victims = [
            cache_id
            for cache_id in ids
            if state.caches.get(cache_id, tenant="anna").chunk_key == file.stem
        ]
        remount(small_disk, "ro")
        for cache_id in victims:
            state.caches.delete(cache_id, tenant="anna")
        assert file.exists()
        assert state.store.tier_of(file.stem) is None, "a deleted chunk came back"
        assert state.store.get(file.stem) is None, "a deleted chunk came back"
        assert len(create_many(state)) == 100
        every_chunk_is_right(state)
        remount(small_disk, "rw")
    lasts(folder, [cache_id for cache_id in ids if cache_id not in victims])


def test_a_state_directory_that_is_read_only(small_disk: Path) -> None:
    open_state(small_disk).close()
    remount(small_disk, "ro")
    with pytest.raises(StoreError, match="catalog"):
        open_state(small_disk)
    remount(small_disk, "rw")
    open_state(small_disk).close()


def test_a_deletion_that_the_disk_refused_is_made_up_for(small_disk: Path) -> None:
    tier = DiskTier(small_disk, 100_000, Events())
    tier.put(key_of(1), chunk_kv(1))
    remount(small_disk, "ro")
    tier.delete(key_of(1))
    assert not tier.contains(key_of(1))
    remount(small_disk, "rw")
    assert not tier.contains(key_of(1))
    tier.check()
    assert list(small_disk.rglob("*.safetensors")) == []
    assert tier.put(key_of(1), chunk_kv(1))
    assert tier.contains(key_of(1))


@pytest.mark.whole
def test_processes_on_one_folder(tmp_path: Path) -> None:
    processes = [start(work, tmp_path, seed) for seed in (1, 2)]
    time.sleep(2.0)
    exits = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    assert exits == [None, None]
    check(tmp_path, "--repair")
    result = check(tmp_path)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("jump", [lambda now: now + 1e7, lambda now: now - 1e7])
def test_a_clock_that_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: Callable[[float], float]
) -> None:
    """Times to live end as the clock says; what has none stays, and what is deleted goes."""
    real = time.time
    with closing(open_state(tmp_path)) as state:
        (kept, gone) = state.caches.create(["1", "2"], tenant="anna").result()
        monkeypatch.setattr(time, "time", lambda: jump(real()))
        (later,) = state.caches.create(["3"], tenant="anna").result()
        state.caches.delete(gone.id, tenant="anna")
        state.caches.sweep()
        monkeypatch.undo()
        state.caches.sweep()
        assert {cache.id for cache in state.caches.list(tenant="anna").items} == {kept.id, later.id}
        assert state.store.tier_of(gone.chunk_key) is None
    lasts(tmp_path, [kept.id, later.id])
