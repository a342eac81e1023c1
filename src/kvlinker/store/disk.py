"""The tier that survives a restart: one file per chunk cache, in a folder on a local disk."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Set
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from kvlinker.events import ChunkDamaged, ChunkEvicted, Events
from kvlinker.store.base import TierCheck
from kvlinker.store.byte_source import FileSource
from kvlinker.store.chunk_file import (
    ChunkFileError,
    EncodedKV,
    encode_chunk,
    open_chunk,
    open_regular,
    read_chunk_file,
    write_chunk_file,
)
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.codecs import RAW, Codec
from kvlinker.store.durability import synchronize
from kvlinker.store.encryption import NOT_SEALED, Sealing
from kvlinker.store.errors import StoreError
from kvlinker.store.layer_stream import ChunkReader
from kvlinker.store.lru import LruIndex
from kvlinker.store.pacing import Rest, no_rest
from kvlinker.store.tier_reader import TierReader

logger = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-f]{64}")
_SUFFIX = ".safetensors"
_TEMPORARY_SUFFIX = ".tmp"
_FOLDER_CHARACTERS = 2
_ASIDE_SUFFIX = ".aside"
_STALE_SECONDS = 600.0


def chunk_place(directory: str, key: str) -> str:
    """Where the file of a chunk lies in a disk tier's ``directory``."""
    return f"{directory}/{key[:_FOLDER_CHARACTERS]}/{key}{_SUFFIX}"


class DiskTier:
    """Keeps ``<directory>/<first two characters of the key>/<key>.safetensors``; a chunk's size is its file's.

    A file appears whole or not at all (written beside its place, synchronised, renamed), and every read verifies it.
    A file's modification time is its last use, so that the order of eviction survives a restart.

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
    ) -> None:
        """Open the folder, create it where missing, evict down to the budget.

        Raises StoreError where the folder cannot be created or listed.
        """
        self.name = name
        self._directory = directory
        self._root = str(directory)
        self._events = events
        self._lock = threading.RLock()
        self._index = LruIndex(budget_bytes, pinned)
        self._sealing = sealing
        self._codec = codec
        self._reserved_bytes = 0
        self._doomed: set[str] = set()  # deleted, but the disk would not let the file go
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_temporary_files()
            found = sorted((status.st_mtime_ns, key, status.st_size) for key, status in self._scan())
        except OSError as error:
            raise StoreError(
                f"The chunk cache folder {directory} cannot be used: {error}. "
                "Make it a folder that this user may write to, or choose another state directory."
            ) from error
        for _, key, nbytes in found:
            self._index.add(key, nbytes)
        self._evict_for(0)

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
                file = stack.enter_context(open_regular(self._path(key)))
                chunk = open_chunk(FileSource(file), key, self._sealing)
            except (ChunkFileError, OSError) as error:
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
            if not self._index.fits(nbytes + self._reserved_bytes):
                return False
            self._evict_for(nbytes)
            self._reserved_bytes += nbytes
        try:
            temporary = self._write_temporary(key, encoded, rest)
        except OSError as error:
            logger.warning("Chunk %s was not written to %s: %s", key, self._directory, error)
            return False
        finally:
            with self._lock:
                self._reserved_bytes -= nbytes
        return self._commit(key, temporary, nbytes)

    def contains(self, key: str) -> bool:
        with self._lock:
            return key in self._index or self._adopt(key)

    def delete(self, key: str) -> None:
        with self._lock:
            self._index.remove(key)
            if self._unlink(self._path(key)):
                self._doomed.discard(key)
            else:
                self._doomed.add(key)

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

    def check(self) -> TierCheck:
        with self._lock:
            doomed = tuple(self._doomed)
        for key in doomed:
            self.delete(key)
        displaced = self._clear_places()
        results = [self._read(key) for key, _ in list(self._scan()) if self.contains(key)]
        damaged = tuple(result for result in results if isinstance(result, ChunkDamaged))
        return TierCheck(self.name, checked=len(results) + len(displaced), damaged=displaced + damaged)

    def close(self) -> None:
        """Nothing is open between calls."""

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not a chunk key: 64 lowercase hexadecimal characters.")
        return Path(self._place(key))

    def _place(self, key: str) -> str:
        return chunk_place(self._root, key)

    def _scan(self) -> Iterator[tuple[str, os.stat_result]]:
        """The keys of all files in the folder, whoever wrote them, with their stat."""
        for key, status in self._places():
            if stat.S_ISREG(status.st_mode):
                yield key, status

    def _places(self) -> Iterator[tuple[str, os.stat_result]]:
        """The keys at whose place anything lies, with its stat."""
        for entry in self._entries():
            key = entry.name.removesuffix(_SUFFIX)
            if len(key) < len(entry.name) and _KEY.fullmatch(key) and entry.path == self._place(key):
                with suppress(FileNotFoundError):
                    yield key, entry.stat(follow_symlinks=False)

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """What lies in the folders that chunk files belong in."""
        for folder in os.scandir(self._directory):
            if len(folder.name) == _FOLDER_CHARACTERS and folder.is_dir():
                with suppress(FileNotFoundError):
                    yield from os.scandir(folder.path)

    def _clear_places(self) -> tuple[ChunkDamaged, ...]:
        """Take away what is no file, or no folder for files; returns what it published of it."""
        damages = []
        for path in self._directory.glob("[0-9a-f][0-9a-f]"):
            if not path.is_dir():
                with suppress(OSError):
                    path.rename(path.with_name(f"{path.name}.{secrets.token_hex(4)}{_ASIDE_SUFFIX}"))
                damages.append(ChunkDamaged(self.name, path.name, "what lay in its place is not a folder"))
        for key, status in list(self._places()):
            if not stat.S_ISREG(status.st_mode):
                with self._lock:
                    self._index.remove(key)
                    self._unlink(self._path(key))
                damages.append(ChunkDamaged(self.name, key, "what lay in its place is not a file"))
        for damage in damages:
            self._events.publish(damage)
        return tuple(damages)

    def _read(self, key: str) -> ChunkKV | ChunkDamaged | None:
        """The verified KV; or the damage, after removing and publishing it; or None where it is a miss for now."""
        try:
            return read_chunk_file(self._path(key), key, self._sealing)
        except (ChunkFileError, OSError) as error:
            return self._failed(key, error)

    def _failed(self, key: str, error: Exception) -> ChunkDamaged | None:
        """What became of a chunk that was not read: a damaged one is removed and published."""
        if isinstance(error, FileNotFoundError):
            reason = "its file vanished"
        elif isinstance(error, OSError) and error.errno != errno.EIO:
            logger.warning("Chunk %s was not read from %s: %s", key, self._directory, error)
            return None
        else:
            reason = str(error)
        with self._lock:
            if not self._index.remove(key):
                return None  # deleted or evicted since the caller looked
            self._unlink(self._path(key))
        damage = ChunkDamaged(self.name, key, reason)
        self._events.publish(damage)
        return damage

    def _touch(self, key: str) -> bool:
        """Note a use; False where the chunk is absent."""
        with self._lock:
            if not self.contains(key):
                return False
            try:
                _set_last_use(self._path(key))
            except FileNotFoundError:
                self._index.remove(key)
                return False
            except OSError as error:
                logger.debug("The use of chunk %s will be forgotten at the next start: %s", key, error)
            return self._index.touch(key)

    def _adopt(self, key: str) -> bool:
        """Take over a file that another process wrote since the start; the lock is held."""
        path = self._path(key)
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
        for key, size in self._index.make_room(nbytes + self._reserved_bytes):
            self._unlink(self._path(key))
            self._events.publish(ChunkEvicted(self.name, size))

    def _write_temporary(self, key: str, encoded: EncodedKV, rest: Rest) -> Path:
        """Write beside the chunk's place and wait for the disk; on an error nothing stays behind."""
        folder = self._path(key).parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=key, suffix=_TEMPORARY_SUFFIX, dir=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                write_chunk_file(file, encoded, partial(self._sealing.pieces, key, encoded.nbytes), rest)
                file.flush()
                _set_last_use(file.fileno())  # kernels before 6.13 stamp too coarsely to sort by
                os.fsync(file.fileno())
        except BaseException:
            self._unlink(Path(name))
            raise
        return Path(name)

    def _commit(self, key: str, temporary: Path, nbytes: int) -> bool:
        """Put a written file in its place, and count it."""
        path = self._path(key)
        try:
            with self._lock:
                self._index.remove(key)
                self._evict_for(nbytes)
                if path.is_dir():
                    self._unlink(path)
                os.replace(temporary, path)
                self._doomed.discard(key)
                self._index.add(key, nbytes)
        except OSError as error:
            logger.warning("Chunk %s was not moved into %s: %s", key, self._directory, error)
            self._unlink(temporary)
            return False
        with suppress(OSError):  # at worst, a power cut now makes a miss of it
            synchronize(path.parent)
        return True

    def _unlink(self, path: Path) -> bool:
        """Whether nothing lies there any more. A folder that is not empty is moved aside: nobody put chunks into it."""
        try:
            if path.is_dir() and not path.is_symlink():
                aside = tempfile.mkdtemp(prefix=path.stem, suffix=_ASIDE_SUFFIX, dir=path.parent)
                path.rename(aside)
                with suppress(OSError):
                    os.rmdir(aside)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            logger.error("%s could not be removed: %s", path, error)
            return False
        return True

    def _remove_temporary_files(self) -> None:
        """What a crash left behind; a young file may be another process's that is still being written."""
        for entry in self._entries():
            if entry.name.endswith(_TEMPORARY_SUFFIX):
                with suppress(FileNotFoundError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS:
                        self._unlink(Path(entry.path))


def _set_last_use(file: Path | int) -> None:
    now = time.time_ns()
    os.utime(file, ns=(now, now))
