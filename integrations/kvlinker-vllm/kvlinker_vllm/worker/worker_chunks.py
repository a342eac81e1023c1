"""The store's folder of chunk files in vLLM's processes, with the most recently used chunks in
memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from kvlinker.base.events import Events
from kvlinker.store import ChunkKV, DiskTier, LayerKV
from kvlinker.store.chunk_kv import changed
from kvlinker.store.eviction import EvictionIndex
from kvlinker.store.format.codecs import RAW, Codec
from kvlinker.store.format.sealing import Sealing
from kvlinker.store.memory.pinned import pinned
from kvlinker.store.tiers.chunk_folder import ChunkFolder

_NO_LIMIT = 1 << 62
"""The budget of a tier that evicts nothing, in bytes: the front end evicts."""


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
        """Open the folder, whose files are written by ``codec``. With ``pins``, chunks lie in
        pinned memory, which devices read while the host goes on.

        Raises StoreError if it cannot be used.
        """
        self._pins = pins
        self._own: Callable[[ChunkKV], ChunkKV] = lambda kv: kv
        self._disk = DiskTier(
            directory, _NO_LIMIT, Events(), sealing=sealing, codec=codec, yields=False
        )
        self._folder = ChunkFolder(directory)
        self._index = EvictionIndex(memory_bytes)
        self._memory: dict[str, ChunkKV] = {}
        self._came: set[str] = set()  # since they were taken, and not evicted again
        self._evicted: set[str] = set()  # the same the other way round
        self._lock = threading.Lock()

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
        """Return this worker's part of the chunk's KV if it is in memory, and still that of the
        chunk's file."""
        with self._lock:
            if not self._index.touch(key):
                return None
            kv = self._memory[key]
            if self._is_stored(key, kv):
                return kv
            self._forget(key)
            return None

    def get(self, key: str) -> ChunkKV | None:
        """Return this worker's part of the chunk's KV, verified, and keep it in memory if there is
        room; None if it is gone or damaged."""
        kv = self.resident(key)
        if kv is None and self.contains(key):
            kv = self._disk.get(key)
            if kv is not None:
                kv = self._keep(key, kv)
        return kv

    def put(self, key: str, kv: ChunkKV, *, keep: bool = True) -> bool:
        """Write the chunk's file, with the KV of all workers, and with ``keep`` have this one's
        part in memory. Returns whether the disk took it."""
        stored = self._disk.put(key, kv)
        if stored and keep:
            self._keep(key, kv)
        return stored

    def take_changes(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the chunks that came to memory since the last call, and those that left it."""
        with self._lock:
            came, evicted = frozenset(self._came), frozenset(self._evicted)
            self._came.clear()
            self._evicted.clear()
            return came, evicted

    def _is_stored(self, key: str, kv: ChunkKV) -> bool:
        """Return whether the chunk's file has this KV: the front end replaces it by means over more
        contexts."""
        opened = self._disk.open(key)
        if opened is None:
            return False
        with closing(opened):
            return opened.contexts == kv.contexts

    def _keep(self, key: str, kv: ChunkKV) -> ChunkKV:
        """Keep this worker's part of the KV in memory if there is room, and return it."""
        kv = self._own_copy(kv)
        with self._lock:
            if key in self._index or not self._index.fits(kv.nbytes):
                return kv
            for old, _ in self._index.make_room(kv.nbytes):
                self._note_eviction(old)
            self._index.add(key, kv.nbytes)
            self._memory[key] = kv
            self._came.add(key)
            self._evicted.discard(key)
        return kv

    def _own_copy(self, kv: ChunkKV) -> ChunkKV:
        """Return this worker's part, without the memory of the whole."""
        own = self._own(kv)
        if self._pins:
            return pinned(own)
        if own.nbytes == kv.nbytes:
            return own
        return changed(own, lambda _, layer: LayerKV(layer.key.clone(), layer.value.clone()))

    def _forget(self, key: str) -> None:
        self._index.remove(key)
        self._note_eviction(key)

    def _note_eviction(self, key: str) -> None:
        del self._memory[key]
        self._came.discard(key)
        self._evicted.add(key)
