"""Indexes the chunk files of a folder and evicts them. The disk tier reads and writes their
content."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvlinker.base.events import ChunkEvicted, Events
from kvlinker.base.garbage import pause_collector
from kvlinker.store.eviction import EvictionIndex
from kvlinker.store.tiers.base import LocalTier
from kvlinker.store.tiers.chunk_folder import ChunkFolder, set_last_use

logger = logging.getLogger(__name__)

_STALE_SECONDS = 600.0
"""The age in seconds from which a temporary file has no writer any more; chosen by hand."""


LOOK_SECONDS = 10.0
"""The seconds after which a look is old; chosen by hand."""

LOOK_BYTES_SHARE = 0.05
"""The share of the budget after whose writing a look is old, too: others may have written as much;
chosen by hand."""

LOOK_SHARE = 0.02
"""The largest share of the time that looks take; chosen by hand."""


class FolderScan(NamedTuple):
    """Lists the files of the folder."""

    keys: tuple[str, ...]
    """The keys of all files, those that were used last at the end."""

    used_by_others: frozenset[str]
    """Files that another process used, or wrote, since the last look."""


class OtherProcesses:
    """Distinguishes uses by other processes from those of this one, by the files' times. Any thread
    may call the methods."""

    def __init__(self) -> None:
        self._looking = threading.Lock()
        self._own_uses: dict[str, int] = {}  # since the last look, in nanoseconds since 1970
        self._written_bytes = 0
        self._looked_at = time.time_ns()
        self._ended = time.monotonic()
        self._seconds = 0.0

    def note_own_use(self, key: str, at: int, *, written_bytes: int = 0) -> None:
        """Note the time that this process gave a file, in nanoseconds since 1970, and the bytes
        that it wrote to it."""
        self._own_uses[key] = at
        self._written_bytes += written_bytes

    def look(
        self, files: Callable[[], Iterable[tuple[str, os.stat_result]]], *, budget_bytes: int
    ) -> FolderScan | None:
        """List the files if the last list is old, and no other thread is listing them. Raises
        OSError."""
        much = self._written_bytes >= LOOK_BYTES_SHARE * budget_bytes
        wait = max(0.0 if much else LOOK_SECONDS, self._seconds / LOOK_SHARE)
        if time.monotonic() < self._ended + wait or not self._looking.acquire(blocking=False):
            return None
        try:
            began, began_ns = time.monotonic(), time.time_ns()
            found = sorted((status.st_mtime_ns, key) for key, status in files())
            own = self._own_uses.copy()
            used = frozenset(
                key for at, key in found if at >= self._looked_at and at != own.get(key)
            )
            for key in [key for key, at in own.items() if at < began_ns]:
                self._own_uses.pop(key, None)
            self._looked_at = began_ns
            self._written_bytes = 0
            self._ended = time.monotonic()
            self._seconds = self._ended - began
            return FolderScan(tuple(key for _, key in found), used)
        finally:
            self._looking.release()


class IndexedFolder(LocalTier):
    """Keeps the files of a ``ChunkFolder`` in the order of their eviction, within a budget of bytes
    and within what the disk has free.

    Several processes may share the folder: each adopts files that another wrote when it is asked
    for them. Before it makes room for a file of its own, it looks now and then what others wrote,
    removed and used: the budget is that of all together, without the files that others wrote since
    then.

    A deleted chunk whose file the disk does not let go of is tombstoned: it is not found any more,
    and deleted again later.

    All methods may be called from any thread: a lock guards the index and the names in the folder.
    Reading and writing files takes no lock.
    """

    def __init__(
        self,
        name: str,
        index: EvictionIndex,
        directory: Path,
        events: Events,
        *,
        yields: bool,
        adopts: bool,
    ) -> None:
        """Create the folder where it is missing, list it into the empty ``index``, and evict down
        to the budget.

        With ``yields``, chunks are evicted where the disk itself has no room, too. Without
        ``adopts``, no other process writes to the folder: what is not in the index is absent, and
        the disk is not asked. Raises OSError.
        """
        super().__init__(name, index)
        self._folder = ChunkFolder(directory)
        self._events = events
        self._yields = yields
        self._others = OtherProcesses() if adopts else None
        self._reserved_bytes = 0
        self._is_full = False
        self._refusing = False
        self._tombstoned: set[str] = set()
        self._guest: IndexedFolder | None = None
        """Keeps its files in what this folder leaves of its budget. When this one needs the room,
        the guest's files go, and none of this one's."""

        self._folder.remove_temporary_files(older_than=_STALE_SECONDS)
        with pause_collector():
            found = sorted(
                (status.st_mtime_ns, key, status.st_size) for key, status in self._folder.files()
            )
            self._index.fill((key, nbytes) for _, key, nbytes in found)
        self._evict_for(0)

    def contains(self, key: str) -> bool:
        """Return whether the chunk's file is known, or, where files are adopted, lies there now."""
        with self._lock:
            return key in self._index or (self._others is not None and self._adopt(key))

    def nbytes(self, key: str) -> int | None:
        with self._lock:
            return self._index.nbytes(key) if self.contains(key) else None

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget, and evict down to it."""
        with self._lock:
            self._index.set_budget(max(0, budget_bytes))
            self._evict_for(0)

    def evict(self, nbytes: int) -> int:
        """Evict ``nbytes`` bytes, or fewer if no more can be evicted; returns how many were."""
        with self._lock:
            before = self.used_bytes
            if self._yields:
                self._evict_until(self._unused_bytes + nbytes)
            return before - self.used_bytes

    def touch(self, key: str) -> bool:
        """Note a use, in the file's modification time, too; returns False if the chunk is
        absent."""
        with self._lock:
            if not self.contains(key):
                return False
            try:
                used_at = set_last_use(self._folder.path(key))
                if self._others is not None:
                    self._others.note_own_use(key, used_at)
            except FileNotFoundError:
                self._index.remove(key)
                return False
            except OSError as error:
                logger.debug(
                    "The use of chunk %s will be forgotten at the next start: %s", key, error
                )
            return self._index.touch(key)

    def make_room(self, key: str, nbytes: int) -> bool:
        """Evict for a chunk's file of ``nbytes`` bytes that another process will write; returns
        whether it has room."""
        with self.reserved(key, nbytes) as has_room:
            return has_room

    @contextmanager
    def reserved(self, key: str, nbytes: int) -> Iterator[bool]:
        """Make room and keep it from others while the block writes the file; yields whether there
        is room."""
        self._follow_others()
        with self._lock:
            has_room = self._index.fits(nbytes + self._reserved_bytes)
            if has_room:
                self._evict_for(nbytes)
                has_room = self._leave_room(nbytes)
                if not has_room:
                    self._note_refusal(
                        key, "the disk is almost full, and the rest is for the catalog"
                    )
            taken = nbytes if has_room else 0
            self._reserved_bytes += taken
        try:
            yield has_room
        finally:
            with self._lock:
                self._reserved_bytes -= taken

    def refuse(self, key: str, nbytes: int, error: OSError) -> None:
        """Note that the disk did not take a chunk's file; where it is full, chunks are evicted for
        the next one."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with self._lock:
                self.evict(nbytes - self._take_back(nbytes))
        self._note_refusal(key, str(error))

    def commit(self, key: str, temporary: Path, nbytes: int) -> bool:
        """Put a written file in its place and count it; returns whether the disk took it."""
        try:
            with self._lock:
                self._index.remove(key)
                if not self._index.fits(nbytes):
                    raise OSError(errno.EDQUOT, "its room was needed for others meanwhile")
                self._evict_for(nbytes)
                used_at = temporary.stat().st_mtime_ns
                self._folder.place(temporary, key)
                self._tombstoned.discard(key)
                self._index.add(key, nbytes)
                if self._others is not None:
                    self._others.note_own_use(key, used_at, written_bytes=nbytes)
        except OSError as error:
            self._note_refusal(key, str(error))
            self._folder.remove(temporary)
            return False
        self._refusing = False
        self._folder.settle(key)
        return True

    def delete(self, key: str) -> bool:
        """Remove the chunk's file; returns False if the disk does not let go of it."""
        with self._lock:
            self._index.remove(key)
            self._limit_guest()
            gone = self._remove(key)
            if gone:
                self._tombstoned.discard(key)
            else:
                self._tombstoned.add(key)
            return gone

    def drop(self, key: str) -> bool:
        """Remove a file that is damaged; returns False if it was deleted or evicted meanwhile."""
        with self._lock:
            if not self._index.remove(key):
                return False
            self._remove(key)
            return True

    def forget(self, key: str) -> None:
        """Count a file no more that another process removed; whatever lies there by now stays."""
        with self._lock:
            self._index.remove(key)

    def clear_places(self) -> list[tuple[str, str]]:
        """Delete what is tombstoned, and take away what is no file, or no folder for files; returns
        the names of such folders and the keys of such files, and says which they are."""
        with self._lock:
            tombstoned = tuple(self._tombstoned)
        for key in tombstoned:
            self.delete(key)
        folders = self._folder.clear_folders()
        displaced = [(name, "what lay in its place is not a folder") for name in folders]
        for key in self._folder.misplaced():
            with self._lock:
                self._index.remove(key)
                self._remove(key)
            displaced.append((key, "what lay in its place is not a file"))
        return displaced

    def _remove(self, key: str) -> bool:
        """Remove what lies in the chunk's place; returns whether nothing lies there any more."""
        return self._folder.remove(self._folder.path(key))

    def _adopt(self, key: str) -> bool:
        """Take over a file that another process wrote since the start; the lock is held."""
        path = self._folder.path(key)
        if key in self._tombstoned:
            return False
        try:
            status = path.lstat()
        except OSError:
            return False
        if not stat.S_ISREG(status.st_mode) or not self._index.fits(
            status.st_size + self._reserved_bytes
        ):
            return False
        self._evict_for(status.st_size)
        self._index.add(key, status.st_size)
        return True

    def _follow_others(self) -> None:
        """Count what other processes wrote and removed, note what they used, and remove what they
        left when they were killed, where the last look is old. The lock is not held while the
        folder is listed."""
        if self._others is None:
            return
        try:
            look = self._others.look(self._folder.files, budget_bytes=self.budget_bytes)
            if look is not None:
                self._folder.remove_temporary_files(older_than=_STALE_SECONDS)
        except OSError as error:
            logger.debug("The folder %s was not listed: %s", self._folder.directory, error)
            return
        if look is None:
            return
        with self._lock:
            for key in set(self._index.keys()).difference(look.keys):
                if not self._folder.path(key).exists():  # else it was written since
                    self._index.remove(key)
            for key in look.keys:
                if key not in self._index:
                    self._adopt(key)
                elif key in look.used_by_others:
                    self._index.touch(key)
            self._limit_guest()

    def _evict_for(self, nbytes: int) -> None:
        """Evict until ``nbytes`` fit in addition to the current writes; the lock is held."""
        self._evict_until(nbytes + self._reserved_bytes)
        self._limit_guest(nbytes)

    def _evict_until(self, nbytes: int) -> None:
        """Evict until ``nbytes`` bytes of the budget are unused; the lock is held."""
        for key, size in self._index.make_room(nbytes):
            self._remove(key)
            self._events.publish(ChunkEvicted(self.name, size))

    def _leave_room(self, nbytes: int) -> bool:
        """Evict until the disk itself has room for ``nbytes`` bytes; returns whether it has. The
        lock is held.

        Where it cannot have it, only as much is evicted as others have to find free.
        """
        if not self._yields:
            return True  # writing will show
        try:
            lacking = self._folder.shortage(nbytes + self._reserved_bytes)
            if lacking and self._take_back(lacking):
                lacking = self._folder.shortage(nbytes + self._reserved_bytes)
            possible = self._index.fits(self._unused_bytes + lacking)
            if not possible:
                lacking = self._folder.shortage(0)
        except OSError:
            return True  # writing will show
        if lacking:
            self._note_full()
            self.evict(lacking)
        return possible

    def _limit_guest(self, nbytes: int = 0) -> None:
        """Leave the guest the room beyond the chunks here and ``nbytes`` more bytes; the lock is
        held."""
        if self._guest is not None:
            self._guest.set_budget(self._unused_bytes - nbytes - self._reserved_bytes)

    def _take_back(self, nbytes: int) -> int:
        """Let the guest evict ``nbytes`` bytes of the disk; returns how many it did."""
        return 0 if self._guest is None else self._guest.evict(nbytes)

    @property
    def _unused_bytes(self) -> int:
        """The bytes of the budget that no chunk takes."""
        return self._index.budget_bytes - self._index.used_bytes

    def _note_full(self) -> None:
        """Log once that the disk is full before the budget is used."""
        if not self._is_full:
            self._is_full = True
            logger.warning(
                "The disk of %s is full, although chunks take %d MB of their %d MB: the oldest are"
                " evicted. Free some space, or lower the budget.",
                self._folder.directory,
                self._index.used_bytes // 10**6,
                self._index.budget_bytes // 10**6,
            )

    def _note_refusal(self, key: str, reason: str) -> None:
        """Log that a chunk was not written: once, until one is written again."""
        if not self._refusing:
            self._refusing = True
            logger.warning(
                "Chunk %s was not written to %s, and others may not be for now: %s",
                key,
                self._folder.directory,
                reason,
            )
