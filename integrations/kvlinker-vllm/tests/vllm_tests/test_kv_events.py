"""What vLLM publishes of its blocks is what the router reads: its own types, its own hashes."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import msgspec
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

from kvlinker_fleet.kv_events import BlockChains, beginnings_of


def published(*events: BlockStored | BlockRemoved | AllBlocksCleared) -> bytes:
    batch = KVEventBatch(ts=0.0, events=list(events))
    batch.data_parallel_rank = 0
    payload: bytes = msgspec.msgpack.encode(batch)
    return payload


def stored(parent: bytes | None, hashes: list[bytes], tokens: list[int]) -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None] * len(hashes),
        group_idx=0,
    )


def test_vllms_events_are_read() -> None:
    chains = BlockChains()
    names = [name for name, _ in beginnings_of(range(12), 4)]
    first = chains.take(published(stored(None, [b"a", b"b"], list(range(8)))))
    assert first == (names[:2], [])
    assert chains.take(published(stored(b"b", [b"c"], [8, 9, 10, 11]))) == (names[2:], [])
    removed = BlockRemoved(block_hashes=[b"c"], medium="GPU", group_idx=0)
    assert chains.take(published(removed)) == ([], names[2:])
    assert set(chains.take(published(AllBlocksCleared())).removed) == set(names[:2])
