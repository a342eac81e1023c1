"""Workers tell which chunks came to their memory and left it, at no cost of all that is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.store.store_chunks import chunk_kv, key_of, same_kv

from kvlinker.store.eviction import EvictionIndex
from kvlinker.store.format.sealing import NOT_SEALED
from kvlinker_vllm.worker.worker_chunks import WorkerChunks

KVS = [chunk_kv(number, tokens=50) for number in range(3)]
KEYS = [key_of(number) for number in range(3)]
PLENTY = 1 << 30
NONE: frozenset[str] = frozenset()


def test_what_came_and_left_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(index: EvictionIndex) -> tuple[str, ...]:
        raise AssertionError("a step must not look at all chunks in memory")

    monkeypatch.setattr(EvictionIndex, "keys", listed)
    chunks = WorkerChunks(tmp_path, memory_bytes=2 * KVS[0].nbytes, sealing=NOT_SEALED)
    for key, kv in zip(KEYS[:2], KVS, strict=False):
        assert chunks.put(key, kv)
    assert chunks.take_changes() == (frozenset(KEYS[:2]), NONE)
    assert chunks.take_changes() == (NONE, NONE)
    assert chunks.resident(KEYS[0]) is not None
    assert chunks.put(KEYS[2], KVS[2])
    assert chunks.take_changes() == (frozenset(KEYS[2:3]), frozenset(KEYS[1:2]))
    chunks._folder.path(KEYS[0]).unlink()
    assert chunks.resident(KEYS[0]) is None
    assert chunks.get(KEYS[1]) is not None
    assert chunks.take_changes() == (frozenset(KEYS[1:2]), frozenset(KEYS[:1]))


def test_kv_that_became_a_mean_is_read_anew(tmp_path: Path) -> None:
    """As the front end stores it: deleted, and written again under its key."""
    chunks = WorkerChunks(tmp_path, memory_bytes=PLENTY, sealing=NOT_SEALED)
    front_end = WorkerChunks(tmp_path, memory_bytes=0, sealing=NOT_SEALED)
    assert chunks.put(KEYS[0], KVS[0])
    for contexts in (2, 3, 4):
        mean = replace(chunk_kv(contexts, tokens=50), contexts=contexts)
        assert front_end._disk.delete(KEYS[0])
        assert front_end.put(KEYS[0], mean)
        assert chunks.resident(KEYS[0]) is None
        assert same_kv(chunks.get(KEYS[0]), mean)
        assert same_kv(chunks.resident(KEYS[0]), mean)


def test_what_the_front_end_takes_leaves_memory_to_others(tmp_path: Path) -> None:
    chunks = WorkerChunks(tmp_path, memory_bytes=KVS[0].nbytes, sealing=NOT_SEALED)
    assert chunks.put(KEYS[0], KVS[0])
    assert chunks.put(KEYS[1], KVS[1], keep=False)
    assert chunks.resident(KEYS[0]) is not None
    assert chunks.resident(KEYS[1]) is None
    assert chunks.take_changes() == (frozenset(KEYS[:1]), NONE)
