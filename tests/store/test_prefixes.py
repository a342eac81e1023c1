"""Prefixes on disk: in what chunks leave of the budget, whole or not at all, and gone with the
process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from kvlinker.base.events import ChunkDamaged, ChunkEvicted, PrefixSpilled
from kvlinker.store import ChunkKV, ChunkStore, DiskTier, HostTier
from kvlinker.store.chunk_kv import LayerKV
from kvlinker.store.format.chunk_file import encode_chunk
from kvlinker.store.format.codecs import find_codec
from kvlinker.store.format.encryption import Cipher
from kvlinker.store.format.sealing import sealing_of
from kvlinker.store.prefixes import (
    LEFT,
    LEFT_SECONDS,
    NAME,
    ProcessFolder,
    SpilledPrefixes,
    _locked,
    remove_leftovers,
)
from kvlinker.store.throttle import Throttle
from kvlinker.store.tiers.chunk_folder import ChunkFolder
from tests.store.store_chunks import Recorder, chunk_kv, key_of, same_kv
from tests.waiting import PATIENCE

FILE_SIZE = encode_chunk(key_of(0), chunk_kv(0)).nbytes
ROOM = 4
"""The files for which there is room."""

MODEL = "0123456789abcdef"


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def disk(tmp_path: Path, recorder: Recorder) -> DiskTier:
    return DiskTier(tmp_path, ROOM * FILE_SIZE, recorder.events)


@pytest.fixture
def store(disk: DiskTier, recorder: Recorder) -> Iterator[ChunkStore]:
    store = ChunkStore([HostTier(1 << 20, recorder.events), disk], recorder.events)
    yield store
    store.close()


@pytest.fixture
def spilled(store: ChunkStore) -> SpilledPrefixes:
    spilled = store.keep_prefixes(MODEL)
    assert spilled is not None
    return spilled


def add(spilled: SpilledPrefixes, *numbers: int) -> None:
    for number in numbers:
        assert spilled.add(key_of(number), chunk_kv(number))
        spilled.flush()


def load(spilled: SpilledPrefixes, number: int) -> ChunkKV | None:
    (future,) = spilled.load([key_of(number)], 10.0)
    kv = future.result(timeout=PATIENCE)
    if kv is None or isinstance(kv, ChunkKV):
        return kv
    assert kv.complete
    return ChunkKV(tuple(layer for index in range(kv.layer_count) if (layer := kv.layer(index))))


def there(spilled: SpilledPrefixes, *numbers: int) -> list[bool]:
    return [spilled.contains(key_of(number)) for number in numbers]


def files(folder: Path) -> list[Path]:
    return list(folder.rglob("*.safetensors"))


def test_what_is_added_comes_back_bit_by_bit(spilled: SpilledPrefixes, recorder: Recorder) -> None:
    add(spilled, 0)
    assert same_kv(load(spilled, 0), chunk_kv(0))
    assert load(spilled, 1) is None
    assert [event.tokens for event in recorder.of(PrefixSpilled)] == [chunk_kv(0).tokens]
    assert spilled.used_bytes == FILE_SIZE


def test_what_waits_to_be_written_is_found(spilled: SpilledPrefixes, store: ChunkStore) -> None:
    store.throttle.idle.clear()
    assert spilled.add(key_of(0), chunk_kv(0))
    assert same_kv(load(spilled, 0), chunk_kv(0))
    store.throttle.idle.set()
    spilled.flush()


def test_prefixes_take_what_chunks_leave(
    disk: DiskTier, spilled: SpilledPrefixes, recorder: Recorder
) -> None:
    add(spilled, 0, 1, 2, 3)
    assert there(spilled, 0, 1, 2, 3) == [True] * 4
    add(spilled, 4)
    assert there(spilled, 0, 1, 4) == [False, True, True], "the least recently used one goes"
    for number in (10, 11):
        assert disk.put(key_of(number), chunk_kv(number))
    assert there(spilled, 1, 2, 3, 4) == [False, False, True, True]
    assert {event.tier for event in recorder.of(ChunkEvicted)} == {NAME}, "no chunk made room"
    for number in (12, 13):
        assert disk.put(key_of(number), chunk_kv(number))
    assert there(spilled, 3, 4) == [False, False]
    assert not spilled.takes(chunk_kv(5).nbytes)
    add(spilled, 5)
    assert there(spilled, 5) == [False]
    assert len(disk) == ROOM
    disk.delete(key_of(10))
    add(spilled, 5)
    assert there(spilled, 5) == [True]
    assert len(disk) == ROOM - 1


def test_prefixes_leave_a_full_disk_first(
    disk: DiskTier, spilled: SpilledPrefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk itself, not the budget, has too little room."""
    disk.put(key_of(10), chunk_kv(10))
    add(spilled, 0, 1)
    room = {"bytes": FILE_SIZE // 2}

    def shortage(folder: ChunkFolder, nbytes: int) -> int:
        used = sum(path.stat().st_size for path in files(disk.directory))
        return max(0, used + nbytes - 3 * FILE_SIZE - room["bytes"])

    monkeypatch.setattr(ChunkFolder, "shortage", shortage)
    assert disk.put(key_of(11), chunk_kv(11))
    assert there(spilled, 0, 1) == [False, True]
    assert disk.contains(key_of(10))
    assert disk.contains(key_of(11))


def test_lossy_codecs_are_not_used(tmp_path: Path, recorder: Recorder) -> None:
    torch.manual_seed(0)
    kv = ChunkKV((LayerKV(torch.randn(2, 5, 32), torch.randn(2, 5, 32)),))
    for codec in ("int8", "int4"):
        disk = DiskTier(tmp_path / codec, 1 << 20, recorder.events, codec=find_codec(codec))
        spilled = SpilledPrefixes(disk, recorder.events, Throttle(), computation=MODEL)
        assert spilled.add(key_of(0), kv)
        spilled.flush()
        assert same_kv(load(spilled, 0), kv)
        spilled.close()


def test_prefixes_are_encrypted_like_chunks(tmp_path: Path, recorder: Recorder) -> None:
    disk = DiskTier(tmp_path, 1 << 20, recorder.events, sealing=sealing_of(Cipher(bytes(32))))
    store = ChunkStore([HostTier(0, recorder.events), disk], recorder.events)
    spilled = store.keep_prefixes(MODEL)
    assert spilled is not None
    add(spilled, 0)
    (file,) = files(tmp_path)
    assert b"kvlinker" not in file.read_bytes()
    assert same_kv(load(spilled, 0), chunk_kv(0))
    store.close()


def test_damage_is_found(spilled: SpilledPrefixes, disk: DiskTier, recorder: Recorder) -> None:
    add(spilled, 0)
    (file,) = files(disk.directory)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert load(spilled, 0) is None
    assert there(spilled, 0) == [False]
    assert [event.tier for event in recorder.of(ChunkDamaged)] == [NAME]


def test_files_go_with_the_store(
    spilled: SpilledPrefixes, store: ChunkStore, disk: DiskTier
) -> None:
    add(spilled, 0)
    assert store.keys() == frozenset(), "they are no chunks"
    store.close()
    assert files(disk.directory) == []


def test_what_a_killed_process_left_is_removed(tmp_path: Path, recorder: Recorder) -> None:
    root = tmp_path / NAME
    killed = ProcessFolder(root, LEFT + MODEL)
    (killed.path / "file").touch()
    assert killed._descriptor is not None
    os.close(killed._descriptor)  # as the kernel does
    running = ProcessFolder(root, LEFT + MODEL)
    assert len(list(root.iterdir())) == 2
    ChunkStore(
        [HostTier(0, recorder.events), DiskTier(tmp_path, 1 << 20, recorder.events)],
        recorder.events,
    ).close()
    assert list(root.iterdir()) == [running.path], "another process that runs keeps its own"
    running.close()
    running.close()
    assert list(root.iterdir()) == []
    remove_leftovers(tmp_path / "nowhere")


def test_the_next_process_with_the_model_takes_over_what_is_left(
    tmp_path: Path, recorder: Recorder
) -> None:
    sealing = sealing_of(Cipher(bytes(32)))

    def opened(model: str) -> tuple[ChunkStore, SpilledPrefixes]:
        disk = DiskTier(tmp_path, 1 << 20, recorder.events, sealing=sealing)
        store = ChunkStore([HostTier(0, recorder.events), disk], recorder.events)
        kept = store.keep_prefixes(model)
        assert kept is not None
        return store, kept

    store, first = opened(MODEL)
    assert first.note is None
    add(first, 0, 1)
    first.leave(b"what it is of")
    store.close()
    assert b"what it is of" not in b"".join(path.read_bytes() for path in tmp_path.rglob("note"))
    store, other = opened("another")
    assert (other.note, there(other, 0)) == (None, [False])
    store.close()
    store, second = opened(MODEL)
    assert second.note == b"what it is of"
    assert same_kv(load(second, 0), chunk_kv(0))
    beside, third = opened(MODEL)
    assert (third.note, there(third, 0)) == (None, [False]), "another process has it"
    add(third, 2)
    third.leave(b"of another")
    beside.close()
    second.leave(b"the later one stays")
    store.close()
    store, last = opened(MODEL)
    assert (last.note, there(last, 0, 1, 2)) == (b"the later one stays", [True, True, False])
    store.close()
    assert list((tmp_path / NAME).iterdir()) == []


def test_files_without_a_note_and_old_ones_go(tmp_path: Path, recorder: Recorder) -> None:
    def opened() -> tuple[ChunkStore, SpilledPrefixes]:
        disk = DiskTier(tmp_path, 1 << 20, recorder.events)
        store = ChunkStore([HostTier(0, recorder.events), disk], recorder.events)
        kept = store.keep_prefixes(MODEL)
        assert kept is not None
        return store, kept

    store, first = opened()
    add(first, 0, 1)
    first.leave(b"of two")
    store.close()
    path = next(path for path in files(tmp_path) if key_of(0) in path.name)
    old = time.time() - LEFT_SECONDS - 1
    os.utime(path, (old, old))
    store, second = opened()
    assert there(second, 0, 1) == [False, True], "not used for a week"
    second.leave(b"of one")
    store.close()
    (note,) = tmp_path.rglob("note")
    note.write_bytes(b"damage")
    store, third = opened()
    assert (third.note, files(tmp_path)) == (None, [])
    store.close()


def test_a_left_folder_that_cannot_be_taken_over_is_let_be(tmp_path: Path) -> None:
    left = tmp_path / NAME / f"{LEFT}{MODEL}"
    (left / "kept").mkdir(parents=True)
    with _locked(left):
        folder = ProcessFolder(tmp_path / NAME, left.name)
    assert (left / "kept").exists()
    assert list(folder.path.iterdir()) == []
    remove_leftovers(tmp_path)
    assert folder.path.exists(), "it is locked itself"
    folder.close()


def test_all_that_is_left_keeps_within_the_budget(tmp_path: Path, recorder: Recorder) -> None:
    for number, model in enumerate(("one", "two", "three")):
        disk = DiskTier(tmp_path, ROOM * FILE_SIZE, recorder.events)
        store = ChunkStore([HostTier(0, recorder.events), disk], recorder.events)
        kept = store.keep_prefixes(model)
        assert kept is not None
        add(kept, 0, 1)
        kept.leave(b"")
        store.close()
        folder = tmp_path / NAME / f"{LEFT}{model}"
        os.utime(folder, (time.time() - 10 + number,) * 2)
    left = {folder.name for folder in (tmp_path / NAME).iterdir()}
    assert left == {f"{LEFT}two", f"{LEFT}three"}, "the oldest goes"


def test_what_no_process_takes_over_is_removed(spilled: SpilledPrefixes, disk: DiskTier) -> None:
    add(spilled, 0)
    spilled.leave(b"")
    remove_leftovers(disk.directory)
    (left,) = (disk.directory / NAME).iterdir()
    old = time.time() - LEFT_SECONDS - 1
    os.utime(left, (old, old))
    remove_leftovers(disk.directory)
    assert list((disk.directory / NAME).iterdir()) == []


def test_what_is_absent_is_known_without_the_disk(
    spilled: SpilledPrefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else writes to the folder, and the engine's scheduler waits for the answer."""
    add(spilled, 0)
    lstat = mock.Mock(side_effect=FileNotFoundError)
    monkeypatch.setattr(Path, "lstat", lstat)
    assert there(spilled, 0, 1) == [True, False]
    lstat.assert_not_called()


def test_without_a_disk_nothing_is_kept(recorder: Recorder) -> None:
    store = ChunkStore([HostTier(0, recorder.events)], recorder.events)
    assert store.keep_prefixes(MODEL) is None
    assert store.spilled_bytes == 0
    store.close()
