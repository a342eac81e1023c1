"""Names chunk files in a folder, and creates and removes them. The disk tier and ``rekey`` use
it."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from kvlinker.base.types.chunks import CHUNK_KEY
from kvlinker.store.format.durability import TEMPORARY_SUFFIX, synchronize, write_beside
from kvlinker.store.tiers.base import check_key

logger = logging.getLogger(__name__)

SPARE_BYTES = 64 << 20
"""Bytes of the disk that chunk files leave free for others, where ``SPARE_SHARE`` is not less;
chosen by hand."""

SPARE_SHARE = 0.05
"""Share of a file system's size that chunk files leave free for others, where ``SPARE_BYTES`` is
not less; chosen by hand."""

_SUFFIX = ".safetensors"
_FILE_NAME = re.compile(rf"({CHUNK_KEY.pattern})\.safetensors")
_FOLDER_CHARACTERS = 2  # of a key, which name its folder: 256 folders
_ASIDE_SUFFIX = ".aside"


class ChunkFolder:
    """Keeps files ``<directory>/<first two characters of the key>/<key>.safetensors``, by chunk
    key.

    A file appears whole or not at all: written to a temporary file, synchronised, renamed. Its
    modification time is its last use. Whatever else lies there is left alone, or moved aside where
    it is in the way. Raises OSError.
    """

    def __init__(self, directory: Path) -> None:
        """Create the folder where it is missing."""
        self.directory = directory
        self._root = str(directory)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def shortage(self, nbytes: int) -> int:
        """Return how many bytes the file system lacks to take ``nbytes`` and leave some to others,
        first the catalog."""
        disk = shutil.disk_usage(self.directory)
        spare = min(SPARE_BYTES, int(disk.total * SPARE_SHARE))
        return max(0, nbytes + spare - disk.free)

    def path(self, key: str) -> Path:
        """Return a chunk's place. Raises ValueError for what is no chunk key."""
        return Path(self._place(check_key(key)))

    def files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the keys of all files, of all processes, with their stat."""
        for key, status in self._places():
            if stat.S_ISREG(status.st_mode):
                yield key, status

    def misplaced(self) -> list[str]:
        """Return the keys at whose place something lies that is no file."""
        return [key for key, status in self._places() if not stat.S_ISREG(status.st_mode)]

    def write(
        self, key: str, write: Callable[[BinaryIO], None], last_use: int | None = None
    ) -> Path:
        """Write a temporary file next to its place, wait for the disk, and return its path. On an
        error nothing stays behind.

        ``last_use`` is in nanoseconds since 1970; now where it is not given.
        """
        path = self.path(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)

        def write_and_stamp(file: BinaryIO) -> None:
            write(file)
            file.flush()
            set_last_use(
                file.fileno(), last_use
            )  # kernels before 6.13 stamp too coarsely to sort by

        return write_beside(path, write_and_stamp)

    def place(self, temporary: Path, key: str) -> None:
        """Put a written file in its place; what lies there already goes."""
        path = self.path(key)
        if path.is_dir():
            self.remove(path)
        os.replace(temporary, path)

    def settle(self, key: str) -> None:
        """Wait until the disk has the file's name; after a power cut before, the chunk is at worst
        a miss. Raises nothing."""
        with suppress(OSError):
            synchronize(self.path(key).parent)

    def remove(self, path: Path) -> bool:
        """Remove the file or folder there, and return whether it is gone. A folder that is not
        empty is moved aside, since it has no chunks. Raises nothing."""
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

    def clear_folders(self) -> list[str]:
        """Move aside whatever takes the name of a folder for files but is none; returns those
        names."""
        found = [path for path in self.directory.glob("[0-9a-f][0-9a-f]") if not path.is_dir()]
        for path in found:
            with suppress(OSError):
                path.rename(path.with_name(f"{path.name}.{secrets.token_hex(4)}{_ASIDE_SUFFIX}"))
        return [path.name for path in found]

    def remove_temporary_files(self, older_than: float) -> None:
        """Remove what a crash left behind, if it is older than ``older_than`` seconds: a younger
        file may be another process's that is still being written."""
        for entry in self._entries():
            if entry.name.endswith(TEMPORARY_SUFFIX):
                with suppress(FileNotFoundError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > older_than:
                        self.remove(Path(entry.path))

    def _place(self, key: str) -> str:
        return f"{self._root}/{key[:_FOLDER_CHARACTERS]}/{key}{_SUFFIX}"

    def _places(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the keys at whose place anything lies, with its stat."""
        for entry in self._entries():
            found = _FILE_NAME.fullmatch(entry.name)
            if found is not None and entry.path == self._place(key := found[1]):
                try:
                    yield key, entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """Yield what lies in the folders that chunk files belong in."""
        for folder in os.scandir(self.directory):
            if len(folder.name) == _FOLDER_CHARACTERS and folder.is_dir():
                with suppress(FileNotFoundError):
                    yield from os.scandir(folder.path)


def set_last_use(file: Path | int, at: int | None = None) -> int:
    """Set a file's time of last use to ``at``, in nanoseconds since 1970, or to now, and return it.
    Raises OSError."""
    at = time.time_ns() if at is None else at
    os.utime(file, ns=(at, at))
    return at
