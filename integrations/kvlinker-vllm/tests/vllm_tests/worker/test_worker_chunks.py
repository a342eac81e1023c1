"""Workers tell which chunks came to their memory and left it, at no cost of all that is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.store.store_chunks import chunk_kv, key_of

from kvlinker.store.eviction import EvictionIndex
from kvlinker.store.format.sealing import NOT_SEALED
from kvlinker_vllm.worker.worker_chunks import WorkerChunks

KVS = [chunk_kv(number, tokens=50) for number in range(3)]
KEYS = [key_of(number) for number in range(3)]
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
