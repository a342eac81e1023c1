"""Chunks that vLLM's workers have computed and written get to where other servers find them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from tests.store.store_chunks import chunk_kv, same_kv, sized

from kvlinker.base.events import Events
from kvlinker.base.types.chunks import Chunk
from kvlinker.store import ChunkStore, open_store
from kvlinker.store.format.sealing import NOT_SEALED
from kvlinker_vllm.frontend.chunk_provider import ChunkProvider
from kvlinker_vllm.frontend.client import VLLMClient
from kvlinker_vllm.protocol.transfer_plan import TransferOutcome, TransferPlan
from kvlinker_vllm.worker.worker_chunks import WorkerChunks

PLENTY = 1 << 24
COMPUTED = chunk_kv(1)


class Workers:
    """vLLM's, for which any chunk is ``COMPUTED``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, folder: Path) -> None:
        self.loop = loop
        self._chunks = WorkerChunks(folder, memory_bytes=0, sealing=NOT_SEALED)

    async def in_thread(self, work: Callable[..., Any], *arguments: object) -> Any:
        return await asyncio.to_thread(work, *arguments)

    async def run_transfer(self, transfer: TransferPlan, tokens: Sequence[int]) -> TransferOutcome:
        taken = [self._chunks.put(each.key, COMPUTED) for each in transfer.captures]
        return TransferOutcome(linked=all(taken))


def provider_of(store: ChunkStore, state_dir: Path) -> ChunkProvider:
    """Make one in a running loop."""
    workers = Workers(asyncio.get_running_loop(), state_dir / "chunks")
    return ChunkProvider(
        cast(VLLMClient, workers), store, fingerprint="model", token_bytes=64, longest=100
    )


def test_other_servers_find_new_chunks_in_shared_tiers(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"object_url": f"file://{tmp_path}/shared"}
    chunk = Chunk((1, 2, 3))

    async def computed() -> str:
        provider = provider_of(store, own.state_dir)
        await provider.cache(chunk, "tenant")
        return provider.key(chunk, "tenant")

    own = sized(tmp_path / "own", 0, PLENTY, **shared)
    with closing(open_store(own, Events())) as store:
        key = asyncio.run(computed())
        store.flush()
    other = sized(tmp_path / "other", 0, PLENTY, **shared)
    with closing(open_store(other, Events())) as store:
        assert same_kv(store.get(key), COMPUTED)


def test_a_chunk_whose_place_was_evicted_is_that_of_its_first_place(tmp_path: Path) -> None:
    chunk = Chunk((1, 2, 3))

    async def provided() -> None:
        provider = provider_of(store, own.state_dir)
        found = await provider.provide(chunk.at_place(2), "tenant")
        assert (found.key, found.made) == (provider.key(chunk, "tenant"), True)
        assert not provider.library("tenant").has(chunk.at_place(2))
        (kv,) = await provider.compute_row([Chunk((7, 8)), chunk])
        assert same_kv(kv, COMPUTED)
        store.put(provider.key(chunk.at_place(2), "tenant"), kv)
        store.flush()
        placed = await provider.provide(chunk.at_place(2), "tenant")
        assert (placed.key, placed.made) == (provider.key(chunk.at_place(2), "tenant"), False)
        assert len(store.keys()) == 2

    own = sized(tmp_path / "own", 0, PLENTY)
    with closing(open_store(own, Events())) as store:
        asyncio.run(provided())


def test_a_row_evicts_for_all_of_it_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the shared tier either."""
    chunks = [Chunk((number, 2, 3)) for number in range(8)]

    async def computed() -> None:
        provider = provider_of(store, own.state_dir)
        kvs = await provider.compute_row(chunks)
        assert len(kvs) == 7
        assert len(asked) == 1
        assert asked[0] > 7 * COMPUTED.nbytes

    asked: list[int] = []
    own = sized(tmp_path / "own", PLENTY, PLENTY, object_url=f"file://{tmp_path}/shared")
    with closing(open_store(own, Events())) as store:
        make_room = store.make_room

        def counted(key: str, nbytes: int) -> bool:
            asked.append(nbytes)
            return make_room(key, nbytes)

        monkeypatch.setattr(store, "make_room", counted)
        asyncio.run(computed())
        store.flush()
        assert not store.keys()
    assert not [each for each in (tmp_path / "shared").rglob("*") if each.is_file()]
