"""The tier that survives a restart: one file per chunk cache, in a folder on a local disk."""

from __future__ import annotations

import errno
import gc
import logging
import stat
import threading
from collections.abc import Iterable, Iterator, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from kvlinker.errors import StoreError
from kvlinker.events import ChunkDamaged, ChunkEvicted, Events
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.eviction import Eviction, EvictionIndex
from kvlinker.store.format.byte_source import FileSource
from kvlinker.store.format.chunk_file import (
    TierReader,
    encode_chunk,
    open_chunk,
    open_regular,
    read_chunk_file,
    write_chunk_file,
)
from kvlinker.store.format.codecs import RAW, Codec
from kvlinker.store.format.compression import MissingLibraryError
from kvlinker.store.format.encryption import NOT_SEALED, Sealing
from kvlinker.store.format.header import ChunkFileError
from kvlinker.store.loading.bandwidth import speed_name
from kvlinker.store.loading.layer_stream import ChunkReader
from kvlinker.store.throttle import Rest, no_rest
from kvlinker.store.tiers.base import TierCheck
from kvlinker.store.tiers.chunk_folder import ChunkFolder, set_last_use

logger = logging.getLogger(__name__)

_STALE_SECONDS = 600.0
_UNREADABLE = {errno.EIO, errno.EACCES, errno.EPERM}
"""Errors that stay, such as those of files that another user wrote: the chunk may as well be written anew."""


class DiskTier:
    """Keeps the files of a ``ChunkFolder``; a chunk's size is its file's, and every read verifies it.

    A file's modification time is its last use, so that the order of last uses survives a restart; how much they add up
    to does not, and what ``note_use`` tells alone does not, either.

    Several processes may share the folder: each finds files that another wrote when it is asked for them, and
    counts in ``used_bytes`` those that it has met. What one evicts or deletes vanishes for the others.

    What else lies at a file's place, such as a folder or a link, is a miss, and gives way to the next file.

    The lock guards the index and the names in the folder; bulk reads and writes happen outside it.
    """

    shared = False

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        events: Events,
        *,
        name: str = "disk",
        pinned: Set[str] = frozenset(),
        sealing: Sealing = NOT_SEALED,
        codec: Codec = RAW,
        eviction: Eviction = "lru",
        yields: bool = True,
    ) -> None:
        """Open the folder, create it where missing, evict down to the budget. ``yields``: evict where the disk itself
        has no room, too; else that is another process's business.

        Raises StoreError where the folder cannot be created or listed.
        """
        self.name = name
        self.speed_name = speed_name(name, place=str(directory.absolute()), codec=codec, sealing=sealing)
        self._events = events
        self._lock = threading.RLock()
        self._index = EvictionIndex(budget_bytes, pinned, eviction)
        self._sealing = sealing
        self._codec = codec
        self._yields = yields
        self._reserved_bytes = 0
        self._refusing = False
        self._doomed: set[str] = set()  # deleted, but the disk would not let the file go
        try:
            self._folder = ChunkFolder(directory)
            self._folder.remove_temporary_files(older_than=_STALE_SECONDS)
            with _collector_paused():
                found = sorted((status.st_mtime_ns, key, status.st_size) for key, status in self._folder.files())
                self._index.fill((key, nbytes) for _, key, nbytes in found)
        except OSError as error:
            raise StoreError(
                f"The chunk cache folder {directory} cannot be used: {error}. "
                "Make it a folder that this user may write to, or choose another state directory."
            ) from error
        self._evict_for(0)

    @property
    def directory(self) -> Path:
        return self._folder.directory

    @property
    def budget_bytes(self) -> int:
        return self._index.budget_bytes

    @property
    def used_bytes(self) -> int:
        return self._index.used_bytes

    def get(self, key: str) -> ChunkKV | None:
        if not self.contains(key):
            return None
        kv = self._read(key)
        if not isinstance(kv, ChunkKV):
            return None
        self._touch(key)
        return kv

    def open(self, key: str) -> ChunkReader | None:
        if not self.contains(key):
            return None
        with ExitStack() as stack:
            try:
                file = stack.enter_context(open_regular(self._folder.path(key)))
                chunk = open_chunk(FileSource(file), key, self._sealing)
            except (ChunkFileError, MissingLibraryError, OSError) as error:
                self._failed(key, error)
                return None
            self._touch(key)
            close = stack.pop_all().close
        return TierReader(chunk, failed=partial(self._failed, key), close=close)

    def put(self, key: str, kv: ChunkKV, rest: Rest = no_rest) -> bool:
        """As ``Tier.put``. Raises ValueError for KV that the file format does not hold: a caller's mistake."""
        if self._touch(key):
            return True
        encoded = encode_chunk(key, kv, self._codec, rest)
        nbytes = self._sealing.nbytes(encoded.nbytes)
        with self._lock:
            if not self.make_room(key, nbytes):
                return False
            self._reserved_bytes += nbytes
        try:
            seal = partial(self._sealing.pieces, key, encoded.nbytes)
            temporary = self._folder.write(key, lambda file: write_chunk_file(file, encoded, seal, rest))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._give_up(nbytes)
            self._refused(key, str(error))
            return False
        finally:
            with self._lock:
                self._reserved_bytes -= nbytes
        return self._commit(key, temporary, nbytes)

    def make_room(self, key: str, nbytes: int) -> bool:
        """Evict for a chunk's file of so many bytes, which may be another process's to write; whether it has room."""
        with self._lock:
            if not self._index.fits(nbytes + self._reserved_bytes):
                return False
            self._evict_for(nbytes)
            if not self._leave_room(nbytes):
                self._refused(key, "the disk is almost full, and the rest is for the catalog")
                return False
            return True

    def note_use(self, key: str, weight: float) -> None:
        with self._lock:
            self._index.touch(key, weight)

    def contains(self, key: str) -> bool:
        with self._lock:
            return key in self._index or self._adopt(key)

    def delete(self, key: str) -> bool:
        with self._lock:
            self._index.remove(key)
            gone = self._remove(key)
            if gone:
                self._doomed.discard(key)
            else:
                self._doomed.add(key)
            return gone

    def set_pinned(self, keys: Set[str]) -> None:
        with self._lock:
            self._index.set_pinned(keys)

    def keys(self) -> tuple[str, ...]:
        with self._lock:
            return self._index.keys()

    def __len__(self) -> int:
        return len(self._index)

    def nbytes(self, key: str) -> int | None:
        with self._lock:
            return self._index.nbytes(key) if self.contains(key) else None

    def sizes(self, keys: Iterable[str]) -> dict[str, int]:
        with self._lock:
            return self._index.sizes(keys)

    def check(self) -> TierCheck:
        with self._lock:
            doomed = tuple(self._doomed)
        for key in doomed:
            self.delete(key)
        displaced = self._clear_places()
        results = [self._read(key) for key, _ in list(self._folder.files()) if self.contains(key)]
        damaged = tuple(result for result in results if isinstance(result, ChunkDamaged))
        return TierCheck(self.name, checked=len(results) + len(displaced), damaged=displaced + damaged)

    def close(self) -> None:
        """Nothing is open between calls."""

    def _clear_places(self) -> tuple[ChunkDamaged, ...]:
        """Take away what is no file, or no folder for files; returns what it published of it."""
        damages = [
            ChunkDamaged(self.name, name, "what lay in its place is not a folder")
            for name in self._folder.clear_folders()
        ]
        for key in self._folder.strangers():
            with self._lock:
                self._index.remove(key)
                self._remove(key)
            damages.append(ChunkDamaged(self.name, key, "what lay in its place is not a file"))
        for damage in damages:
            self._events.publish(damage)
        return tuple(damages)

    def _remove(self, key: str) -> bool:
        """Whether nothing lies in the chunk's place any more."""
        return self._folder.remove(self._folder.path(key))

    def _read(self, key: str) -> ChunkKV | ChunkDamaged | None:
        """The verified KV; or the damage, after removing and publishing it; or None where it is a miss for now."""
        try:
            return read_chunk_file(self._folder.path(key), key, self._sealing)
        except (ChunkFileError, MissingLibraryError, OSError) as error:
            return self._failed(key, error)

    def _failed(self, key: str, error: Exception) -> ChunkDamaged | None:
        """What became of a chunk that was not read: a damaged one is removed and published."""
        if isinstance(error, FileNotFoundError):
            reason = "its file vanished"
        elif isinstance(error, MissingLibraryError) or (isinstance(error, OSError) and error.errno not in _UNREADABLE):
            logger.warning("Chunk %s was not read from %s: %s", key, self._folder.directory, error)
            return None
        else:
            reason = str(error)
        with self._lock:
            if not self._index.remove(key):
                return None  # deleted or evicted since the caller looked
            self._remove(key)
        damage = ChunkDamaged(self.name, key, reason)
        self._events.publish(damage)
        return damage

    def _touch(self, key: str) -> bool:
        """Note a use; False where the chunk is absent."""
        with self._lock:
            if not self.contains(key):
                return False
            try:
                set_last_use(self._folder.path(key))
            except FileNotFoundError:
                self._index.remove(key)
                return False
            except OSError as error:
                logger.debug("The use of chunk %s will be forgotten at the next start: %s", key, error)
            return self._index.touch(key)

    def _adopt(self, key: str) -> bool:
        """Take over a file that another process wrote since the start; the lock is held."""
        path = self._folder.path(key)
        if key in self._doomed:
            return False
        try:
            status = path.lstat()
        except OSError:
            return False
        if not stat.S_ISREG(status.st_mode) or not self._index.fits(status.st_size + self._reserved_bytes):
            return False
        self._evict_for(status.st_size)
        self._index.add(key, status.st_size)
        return True

    def _evict_for(self, nbytes: int) -> None:
        """Evict until ``nbytes`` fit beside what is being written; the lock is held."""
        self._evict(nbytes + self._reserved_bytes)

    def _evict(self, nbytes: int) -> None:
        for key, size in self._index.make_room(nbytes):
            self._remove(key)
            self._events.publish(ChunkEvicted(self.name, size))

    def _leave_room(self, nbytes: int) -> bool:
        """Whether the disk itself has room for so many bytes, after evicting for them; the lock is held.

        Where it cannot have it, only as much is evicted as others have to find free.
        """
        if not self._yields:
            return True  # writing will tell
        try:
            lacking = self._folder.shortage(nbytes + self._reserved_bytes)
            possible = self._index.fits(self._unused_bytes + lacking)
            if not possible:
                lacking = self._folder.shortage(0)
        except OSError:
            return True  # writing will tell
        if lacking:
            self._give_up(lacking)
        return possible

    def _give_up(self, nbytes: int) -> None:
        """Evict so many bytes, or what can be evicted."""
        if self._yields:
            with self._lock:
                self._evict(self._unused_bytes + nbytes)

    @property
    def _unused_bytes(self) -> int:
        """Of the budget."""
        return self._index.budget_bytes - self._index.used_bytes

    def _refused(self, key: str, reason: str) -> None:
        """Logged once, until a chunk is written again."""
        if not self._refusing:
            self._refusing = True
            logger.warning(
                "Chunk %s was not written to %s, and others may not be for now: %s", key, self._folder.directory, reason
            )

    def _commit(self, key: str, temporary: Path, nbytes: int) -> bool:
        """Put a written file in its place, and count it."""
        try:
            with self._lock:
                self._index.remove(key)
                self._evict_for(nbytes)
                self._folder.place(temporary, key)
                self._doomed.discard(key)
                self._index.add(key, nbytes)
        except OSError as error:
            self._refused(key, str(error))
            self._folder.remove(temporary)
            return False
        self._refusing = False
        self._folder.settle(key)
        return True


@contextmanager
def _collector_paused() -> Iterator[None]:
    """While many objects are made that all stay: the garbage collector would look at them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
