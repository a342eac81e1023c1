"""The store's folder of chunk files in vLLM's processes, with the most recently used chunks in
memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kvlinker.base.events import Events
from kvlinker.store import ChunkKV, DiskTier, LayerKV
from kvlinker.store.chunk_kv import changed
from kvlinker.store.format.codecs import RAW, Codec
from kvlinker.store.format.encryption import Sealing
from kvlinker.store.memory.pinned import pinned
from kvlinker.store.tiers.chunk_folder import ChunkFolder
from kvlinker.store.tiers.host import HostTier

_NO_LIMIT = 1 << 62


class WorkerChunks:
    """Reads and writes chunk files, but evicts none: the store does that, in the process that has
    the catalog, and chunks that it deletes are gone here, too. All methods may be called from any
    thread."""

    def __init__(
        self,
        directory: Path,
        *,
        memory_bytes: int,
        sealing: Sealing,
        codec: Codec = RAW,
        pins: bool = False,
    ) -> None:
        """Open the folder, in which ``codec`` is how files are written. With ``pins``, chunks lie
        in pinned memory, which devices read without anybody waiting.

        Raises StoreError if it cannot be used.
        """
        self._pins = pins
        self._own: Callable[[ChunkKV], ChunkKV] = lambda kv: kv
        self._disk = DiskTier(
            directory, _NO_LIMIT, Events(), sealing=sealing, codec=codec, yields=False
        )
        self._folder = ChunkFolder(directory)
        self._memory = HostTier(memory_bytes, Events())
        self._told: frozenset[str] = frozenset()
        self._changed = False  # true if more or less may be in memory than was told

    def keep_only(self, own: Callable[[ChunkKV], ChunkKV]) -> None:
        """Keep, and return, only the result of ``own`` for a chunk: this worker's part of it.
        Errors that it raises are those of ``get`` and ``put``. To be called before there are
        any."""
        self._own = own

    def contains(self, key: str) -> bool:
        """Return whether the chunk's file is in the folder."""
        return os.path.exists(
            self._folder.path(key)
        )  # not Path's, which raises what the file system does

    def resident(self, key: str) -> ChunkKV | None:
        """Return this worker's part of the chunk's KV if it is in memory, and the chunk still in
        the folder."""
        kv = self._memory.get(key)
        if kv is not None and not self.contains(key):
            self._memory.delete(key)
            self._changed = True
            return None
        return kv

    def get(self, key: str) -> ChunkKV | None:
        """Return this worker's part of the chunk's KV, verified, and keep it in memory if there is
        room; None if it is gone or damaged."""
        kv = self.resident(key)
        if kv is None and self.contains(key):
            kv = self._disk.get(key)
            if kv is not None:
                kv = self._keep(key, kv)
        return kv

    def put(self, key: str, kv: ChunkKV) -> bool:
        """Write the chunk's file, with the KV of all workers, and keep this one's part in memory.
        Returns whether the disk took it."""
        stored = self._disk.put(key, kv)
        if stored:
            self._keep(key, kv)
        return stored

    def take_changes(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the chunks that came to memory since the last call, and those that left it. One
        thread may call it."""
        if not self._changed:
            return frozenset(), frozenset()
        self._changed = False
        before, self._told = self._told, frozenset(self._memory.keys())
        return self._told - before, before - self._told

    def _keep(self, key: str, kv: ChunkKV) -> ChunkKV:
        """Keep this worker's part of the KV, without the memory of the whole, if there is room, and
        return it."""
        own = self._own(kv)
        if self._pins:
            own = pinned(own)
        elif own.nbytes < kv.nbytes:
            own = changed(own, lambda _, layer: LayerKV(layer.key.clone(), layer.value.clone()))
        self._memory.put(key, own)
        self._changed = True
        return own
