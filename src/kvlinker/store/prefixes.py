"""Keeps the KV of prefixes on disk that an engine's pool evicts, until prompts begin with them
again, in the next process, too."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from kvlinker.base import system
from kvlinker.base.errors import StoreError
from kvlinker.base.events import Events, PrefixSpilled
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.loading.arriving import KV
from kvlinker.store.loading.bandwidths import Bandwidths
from kvlinker.store.loading.loader import LayerLoader
from kvlinker.store.loading.prompt_load import ChunkLoad, LoadedChunk, OpenedChunk, Urgency
from kvlinker.store.speeds import Speeds
from kvlinker.store.throttle import Throttle
from kvlinker.store.tiers.chunk_folder import ChunkFolder
from kvlinker.store.tiers.disk import DiskTier
from kvlinker.store.writer import BackgroundWriter

NAME = "prefixes"
"""The name of the files' folder in the disk tier's, and of the tier that they are in events."""

LEFT = "left-"
"""The beginning of the name of a folder that a process left for the next process with its model."""

LEFT_SECONDS = 7 * 24 * 3600.0
"""The seconds, a week, after which such a folder is removed if no process has taken it over; chosen
by hand."""

WRITE_QUEUE_BYTES = 256 << 20
"""The most bytes that wait in memory to be written; what would exceed them is not kept; chosen by
hand."""


class SpilledPrefixes:
    """Keeps KV in files as it lies in the engine's pool: exact, keys rotated for their places,
    encrypted like chunks.

    The files take what chunks leave of the disk tier's budget: no chunk is evicted for them, and
    they go first, the least recently used of them before others. Only the process knows what they
    hold, until it leaves them, with a note, to the next one that computes alike; so several
    processes that share a state directory do not see each other's, and each counts its own. Of
    processes that compute alike, the one that ends last leaves its own.

    ``add`` leaves writing to a background thread, which gives way to computations. All methods may
    be called from any thread.
    """

    def __init__(
        self,
        disk: DiskTier,
        events: Events,
        throttle: Throttle,
        speeds: Speeds | None = None,
        *,
        computation: str,
    ) -> None:
        """``speeds`` remembers how fast files are read; ``computation`` identifies all that KV
        depends on beside prompts. Raises StoreError if the folder cannot be made."""
        root = disk.directory / NAME
        try:
            self._folder = ProcessFolder(root, LEFT + computation)
        except OSError as error:
            raise StoreError(
                f"The folder {root} cannot be used: {error}. Make it a folder that this user may"
                " write to, or set prefix_cache to off."
            ) from error
        self._events = events
        self._tier = disk.beside(self._folder.path, NAME)
        self.note = self._tier.read_note()
        """The note of the process that left the files; None if there are none."""

        unknown = self._tier.keys() if self.note is None else self._tier.unused_for(LEFT_SECONDS)
        for key in unknown:
            self._tier.delete(key)
        self._writer = BackgroundWriter(self._tier, WRITE_QUEUE_BYTES, throttle, self._write)
        self._bandwidths = Bandwidths(speeds, {NAME: f"{disk.speed_name} {NAME}"})
        self._loader = LayerLoader(self._bandwidths)

    @property
    def used_bytes(self) -> int:
        """The bytes of all files."""
        return self._tier.used_bytes

    def contains(self, key: str) -> bool:
        """Return whether ``load`` would find the KV."""
        return self._writer.get(key) is not None or self._tier.contains(key)

    def pays(self, nbytes: int, seconds: float) -> bool:
        """Return whether reading ``nbytes`` bytes is expected to take no longer than computing
        them, which takes ``seconds``; True if that is not known, or was not measured lately."""
        return self._bandwidths.worth_loading(NAME, nbytes, seconds)

    def takes(self, nbytes: int) -> bool:
        """Return whether there is room for ``nbytes`` bytes of KV, on disk and among what waits to
        be written."""
        return nbytes <= self._tier.budget_bytes and self._writer.takes(nbytes)

    def add(self, key: str, kv: ChunkKV) -> bool:
        """Keep the KV, which the caller must not modify any more; returns False if too much waits
        already."""
        return self._writer.add(key, kv)

    def load(self, keys: Sequence[str], seconds: float) -> list[Future[KV | None]]:
        """Load the KV of one prompt's keys, which would take ``seconds`` to compute: each future
        gets it whole, or None if it is gone, damaged, or late."""
        chunks = {key: ChunkLoad(key, partial(self._open, key)) for key in keys}
        if chunks:
            self._loader.load(list(chunks.values()), Urgency(prefill=seconds))
        return [chunks[key].begun for key in keys]

    def touch(self, key: str) -> None:
        """Note a use."""
        self._tier.touch(key)

    @property
    def budget_bytes(self) -> int:
        """The bytes that all files may have."""
        return self._tier.budget_bytes

    def flush(self, deadline: float | None = None) -> None:
        """Wait until all that was added is written or refused, or the ``deadline``, on the
        monotonic clock, is over."""
        self._writer.flush(deadline)

    def drop_waiting(self) -> None:
        """Do not write what waits for it."""
        waiting = self._writer.keys()
        for key in waiting:
            self._writer.cancel(key)

    def leave(self, note: bytes) -> None:
        """Leave the files to the next process that computes alike, which gets the ``note``. What
        others have left goes, the oldest first, where all together exceed the budget. Raises
        OSError; then, as without this call, ``close`` removes the files."""
        self._tier.write_note(note)
        self._folder.leave()
        remove_leftovers(self._folder.path.parents[1], most_bytes=self.budget_bytes)

    def close(self) -> None:
        """Remove all files that are not left. Idempotent."""
        self._loader.close()
        self.drop_waiting()
        self._writer.close(time.monotonic())
        self._folder.close()

    def _open(self, key: str, tried: Set[str]) -> OpenedChunk | LoadedChunk | None:
        waiting = self._writer.get(key)
        if waiting is not None:
            return LoadedChunk(NAME, waiting, 0.0)
        reader = None if tried else self._tier.open(key)
        return None if reader is None else OpenedChunk(NAME, reader)

    def _write(self, kv: ChunkKV) -> None:
        self._events.publish(PrefixSpilled(kv.tokens, kv.nbytes))


class ProcessFolder:
    """Keeps a folder for this process alone. It is locked as long as the process lives; the kernel
    unlocks it then, and the next process removes what a killed one has left."""

    def __init__(self, root: Path, left: str) -> None:
        """Take over the folder of the name ``left`` in ``root``, or make one there; ``root`` is
        made where it is missing. Raises OSError."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._left = root / left
        with _locked(root):
            self.path = Path(tempfile.mkdtemp(dir=root))
            # Nothing may be left, or what another user or a process that still has it holds.
            with suppress(OSError), _locked(self._left, wait=False):
                self._left.rename(self.path)
            self._descriptor: int | None = _lock(self.path)

    def leave(self) -> None:
        """Give the folder the name under which the next process takes it over, instead of one that
        was left before. Raises OSError."""
        root = self._left.parent
        with _locked(root):
            before = Path(tempfile.mkdtemp(dir=root))
            with suppress(OSError):
                self._left.rename(before)
            self.path.rename(self._left)
        self._unlock()
        shutil.rmtree(before, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder with all that is in it, unless it was left. Idempotent."""
        if self._descriptor is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        if self._descriptor is not None:
            system.unlock(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None


def remove_leftovers(
    chunks: Path, *, older_than: float = LEFT_SECONDS, most_bytes: float = math.inf
) -> None:
    """Remove the files of processes that have ended, in the folder of a disk tier's chunks: those
    that were killed, and what was left for others that many seconds ago, or before what already
    takes ``most_bytes``. Raises nothing."""
    root = chunks / NAME
    with suppress(OSError), _locked(root):
        for left_at, folder in sorted(
            ((folder.stat().st_mtime, folder) for folder in root.iterdir()), reverse=True
        ):
            with suppress(OSError), _locked(folder, wait=False):
                is_left = folder.name.startswith(LEFT) and time.time() - left_at < older_than
                if is_left and most_bytes < math.inf:
                    most_bytes -= sum(status.st_size for _, status in ChunkFolder(folder).files())
                if not is_left or most_bytes < 0:
                    shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path, *, wait: bool = True) -> int:
    """Return a descriptor of the folder, which is locked. Raises OSError if the folder is missing,
    or locked and not waited for."""
    descriptor = system.open_folder(folder)
    try:
        system.lock(descriptor, wait=wait)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Lock the folder for the time of the block. Raises OSError if it is missing, or locked and not
    waited for."""
    descriptor = _lock(folder, wait=wait)
    try:
        yield
    finally:
        system.unlock(descriptor)
        os.close(descriptor)
