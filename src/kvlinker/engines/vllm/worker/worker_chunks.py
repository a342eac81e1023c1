"""The store's folder of chunk files in vLLM's processes, with the most recently used chunks in
memory."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

from kvlinker.base.events import Events
from kvlinker.store import ChunkKV, DiskTier, LayerKV
from kvlinker.store.eviction import EvictionIndex
from kvlinker.store.format.encryption import Sealing
from kvlinker.store.tiers.chunk_folder import ChunkFolder

_NO_LIMIT = 1 << 62


class WorkerChunks:
    """Reads and writes chunk files, but evicts none: the store does that, in the process that has
    the catalog, and chunks that it deletes are gone here, too. All methods may be called from any
    thread."""

    def __init__(
        self, directory: Path, *, memory_bytes: int, sealing: Sealing, pinned: bool = False
    ) -> None:
        """Open the folder. With ``pinned``, chunks lie in pinned memory, which devices read without
        anybody waiting.

        Raises StoreError where it cannot be used.
        """
        self._pinned = pinned
        self._disk = DiskTier(directory, _NO_LIMIT, Events(), sealing=sealing, yields=False)
        self._folder = ChunkFolder(directory)
        self._index = EvictionIndex(memory_bytes)
        self._memory: dict[str, ChunkKV] = {}
        self._evicted: set[str] = set()
        self._lock = threading.Lock()

    def contains(self, key: str) -> bool:
        """Return whether the chunk's file is in the folder."""
        return os.path.exists(
            self._folder.path(key)
        )  # not Path's, which raises what the file system does

    def resident(self, key: str) -> ChunkKV | None:
        """Return the chunk's KV if it is in memory, and still in the folder."""
        with self._lock:
            if not self._index.touch(key):
                return None
            if self.contains(key):
                return self._memory[key]
            self._forget(key)
            return None

    def get(self, key: str) -> ChunkKV | None:
        """Return the chunk's KV, verified, and keep it in memory if there is room; None if it is
        gone or damaged."""
        kv = self.resident(key)
        if kv is None and self.contains(key):
            kv = self._disk.get(key)
            if kv is not None:
                kv = self._keep(key, kv)
        return kv

    def put(self, key: str, kv: ChunkKV) -> bool:
        """Write the chunk's file, and keep its KV in memory. Returns whether the disk took it."""
        stored = self._disk.put(key, kv)
        if stored:
            self._keep(key, kv)
        return stored

    def holds(self, key: str) -> bool:
        """Return whether the chunk is in memory."""
        with self._lock:
            return key in self._memory

    def take_evicted(self) -> frozenset[str]:
        """Return the chunks that left memory since the last call."""
        with self._lock:
            evicted = frozenset(self._evicted)
            self._evicted.clear()
            return evicted

    def _keep(self, key: str, kv: ChunkKV) -> ChunkKV:
        """Keep the KV in memory if there is room, and return what is to be used of it."""
        if self._pinned:
            layers = tuple(
                LayerKV(layer.key.pin_memory(), layer.value.pin_memory()) for layer in kv.layers
            )
            kv = replace(kv, layers=layers)
        with self._lock:
            if key in self._index or not self._index.fits(kv.nbytes):
                return kv
            for old, _ in self._index.make_room(kv.nbytes):
                del self._memory[old]
                self._evicted.add(old)
            self._index.add(key, kv.nbytes)
            self._memory[key] = kv
            self._evicted.discard(key)
        return kv

    def _forget(self, key: str) -> None:
        self._index.remove(key)
        del self._memory[key]
        self._evicted.add(key)
