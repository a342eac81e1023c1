"""Provides chunks as files in the store's folder, where vLLM's workers find them; missing ones are
computed by vLLM."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from kvlinker.base.errors import ContextLengthError
from kvlinker.base.types.chunk_scores import ChunkScores
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.engines.contract.places import TenantLibrary, row_text
from kvlinker.store import ChunkKV, ChunkStore, StoreError
from kvlinker_vllm.frontend.client import VLLMClient
from kvlinker_vllm.protocol.transfer_plan import plan_capture, plan_row

logger = logging.getLogger("kvlinker.vllm.frontend.chunk_provider")

DISK = "disk"

KEY_BYTES = 32
"""The bytes of a key, which are written as hexadecimal digits."""

BUILT_AT_ONCE = 2
"""The most chunks that are computed at once while no answer waits for them: more would slow answers
down."""

TOKEN_OVERHEAD_BYTES = 16
"""The approximate bytes of a token in a chunk's file beside its KV: its id and its scores."""

FILE_OVERHEAD_BYTES = 1 << 14
"""The approximate bytes of scores, header and encryption in a chunk's file."""


class ChunkNotStoredError(StoreError):
    """Raised when a chunk could not be computed and written. One that was written and has vanished
    since is evicted like any other, and no error."""


class ProvidedChunk(NamedTuple):
    """A chunk whose file is stored, where the store has room for it."""

    key: str
    """The key of its KV."""

    scores: ChunkScores | None
    """The scores that are stored with its KV, if any."""

    made: bool
    """True if it was computed for this call, and not begun by another."""


class ChunkProvider:
    """Makes sure that chunks' files exist when vLLM's workers need them. All methods are called in
    the client's loop."""

    def __init__(
        self,
        client: VLLMClient,
        store: ChunkStore,
        *,
        fingerprint: str,
        token_bytes: int,
        longest: int,
        unrelated: Sequence[int] = (),
    ) -> None:
        """``token_bytes`` is the size of a token's KV in bytes, ``longest`` the most tokens that a
        chunk and its generation context may have together, ``unrelated`` the text after which
        chunks are computed, too, to measure their sensitivity; none is measured without."""
        self._client = client
        self._store = store
        self._fingerprint = fingerprint
        self._token_bytes = token_bytes
        self._longest = longest
        self._unrelated = tuple(unrelated)
        self._building: dict[str, asyncio.Task[None]] = {}
        self._refusing = False
        self._room = asyncio.Semaphore(BUILT_AT_ONCE)

    def key(self, chunk: Chunk, tenant: str) -> str:
        """Return the key of the chunk's KV."""
        return chunk_key(chunk, fingerprint=self._fingerprint, tenant=tenant)

    def library(self, tenant: str) -> TenantLibrary:
        """Return the library of the tenant's chunks, which has no variants."""
        return TenantLibrary(self._store, self._fingerprint, tenant)

    async def cache(self, chunk: Chunk, tenant: str) -> int:
        """Make sure that the chunk's file is stored, and return its bytes; 0 if it has vanished
        since. Raises KVLinkerError, ChunkNotStoredError among them."""
        key = self.key(chunk, tenant)
        async with self._room:
            stored = await self._client.in_thread(self._store.nbytes, key)
            if stored is None:
                await self._build(key, chunk)
                stored = await self._client.in_thread(self._store.nbytes, key)
        return stored or 0

    async def provide(self, chunk: Chunk, tenant: str) -> ProvidedChunk:
        """Make sure that the chunk's file is stored; the file of its first place if that of its own
        was evicted.

        Where the store has no room for the file, there is none: vLLM's scheduler sees that, and has
        the request computed in full.

        Raises KVLinkerError.
        """
        key = self.key(chunk, tenant)
        found, scores = await self._client.in_thread(self._fetch, key)
        if chunk.place and not found:
            return await self.provide(chunk.at_place(0), tenant)
        made = False
        if not found:
            made = key not in self._building
            try:
                await self._build(key, chunk)
            except ChunkNotStoredError as error:
                self._note_refused(error)
                return ProvidedChunk(key, None, made)
            found, scores = await self._client.in_thread(self._fetch, key)
        return ProvidedChunk(key, scores, made)

    async def compute_row(self, chunks: Sequence[Chunk]) -> tuple[ChunkKV, ...]:
        """Compute chunks behind one another, and return the KV of all but the first; vLLM's workers
        hand it over in files. Raises ChunkNotStoredError where they cannot."""
        tokens, spans = row_text(chunks)
        keys = [secrets.token_hex(KEY_BYTES) for _ in spans[1:]]
        await self._make_room(keys[0], chunks[1:])
        try:
            outcome = await self._client.run_transfer(plan_row(keys, spans[1:]), tokens)
        finally:
            kvs = [await self._client.in_thread(self._store.take, key) for key in keys]
        if not outcome.linked or None in kvs:
            raise ChunkNotStoredError(
                f"A row of {len(chunks)} chunks could not be computed and stored: see the log of"
                " vLLM's processes."
            )
        return tuple(kv for kv in kvs if kv is not None)

    def cancel(self) -> None:
        """Cancel the chunks that are being computed."""
        for task in self._building.values():
            task.cancel()

    async def _build(self, key: str, chunk: Chunk) -> None:
        """Compute and store the chunk once, however many wait for it."""
        task = self._building.get(key)
        if task is None:
            task = self._building[key] = self._client.loop.create_task(self._compute(key, chunk))
            task.add_done_callback(lambda _: self._building.pop(key, None))
        await asyncio.shield(task)

    async def _compute(self, key: str, chunk: Chunk) -> None:
        tokens = (*chunk.prefix, *chunk.tokens)
        if len(tokens) > self._longest:
            raise ContextLengthError(
                f"A chunk has {len(tokens)} tokens with its context, but vLLM computes at"
                f" most {self._longest}. Shorten it, or split it into chunks.",
                param="chunks",
            )
        await self._make_room(key, [chunk])
        stored = False
        if self._unrelated and chunk.scored and len(tokens) + len(self._unrelated) <= self._longest:
            stored = await self._capture(key, chunk, self._unrelated)
        if not stored and not await self._capture(key, chunk):
            raise ChunkNotStoredError(
                f"Chunk {key} could not be computed and stored: see the log of vLLM's processes,"
                " and whether the state directory can be written to."
            )
        await self._client.in_thread(self._store.share, key)
        self._refusing = False

    async def _make_room(self, key: str, chunks: Sequence[Chunk]) -> None:
        """Evict until the files of ``chunks`` fit, of which ``key`` is the first one's."""
        tokens = sum(map(len, chunks))
        nbytes = tokens * (self._token_bytes + TOKEN_OVERHEAD_BYTES)
        nbytes += len(chunks) * FILE_OVERHEAD_BYTES
        if not await self._client.in_thread(self._store.make_room, key, nbytes):
            raise ChunkNotStoredError(
                f"There is no room for chunk {key} of {tokens} tokens, about {nbytes} bytes. Give"
                " it more disk_space, or the disk itself more room, or unpin context caches."
            )

    async def _capture(self, key: str, chunk: Chunk, unrelated: Sequence[int] = ()) -> bool:
        """Let vLLM compute and store the chunk, and measure its sensitivity to an ``unrelated``
        text, if there is one. Return whether that succeeded."""
        before = (*chunk.prefix, *unrelated)
        tokens = (*before, *chunk.tokens)
        capture = plan_capture(key, begin=len(before), end=len(tokens), unrelated=len(unrelated))
        outcome = await self._client.run_transfer(capture, tokens)
        return outcome.linked

    def _note_refused(self, error: ChunkNotStoredError) -> None:
        """Log that chunks are not stored, once until one is stored again."""
        if not self._refusing:
            self._refusing = True
            logger.warning(
                "Prompts with chunks that are not stored are computed in full. %s", error
            )

    def _fetch(self, key: str) -> tuple[bool, ChunkScores | None]:
        """Return whether the chunk's file is there, and its scores. A chunk in a shared tier is
        copied to the disk."""
        opened = self._store.open(key)
        if opened is None:
            return False, None
        scores, tier = opened.reader.scores, opened.tier
        opened.reader.close()
        if tier != DISK:
            if self._store.get(key) is None:
                return False, None
            self._store.flush()
        return True, scores
