"""Features that only some operating systems have: file locks, memory limits, preallocation, careful
opening, and reads by several threads. Each function's docstring says what happens where it is
missing."""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from pathlib import Path
from threading import Lock

if sys.platform != "win32":
    import fcntl
    import resource

logger = logging.getLogger(__name__)

_seeking = Lock()

HAS_LOCKS = sys.platform != "win32"

OPEN_WITH_CARE = sum(
    getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
)
"""Flags for ``os.open`` that refuse symbolic links and do not block on pipes. 0 on Windows, where
ordinary users cannot make links, and where no file blocks when it is opened."""


def lock(descriptor: int, *, alone: bool = True, wait: bool = True) -> None:
    """Lock an open file or folder against other processes; with ``alone=False``, share the lock
    with them. Raises BlockingIOError if another process holds the lock and ``wait`` is false, and
    OSError. Where the system has no locks, nothing is locked, and the log says so once."""
    if not HAS_LOCKS:
        _warn_of_locks()
        return
    fcntl.flock(
        descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB)
    )


def unlock(descriptor: int) -> None:
    """Free the lock of an open file, also of processes that were forked with it."""
    if HAS_LOCKS:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


@cache
def _warn_of_locks() -> None:
    logger.warning("This system has no locks of folders: use each state directory by one process.")


def open_folder(folder: Path) -> int:
    """Return a descriptor of a folder, to lock it. Raises OSError where it is missing, or a link.

    Windows opens no folders; there the descriptor is of nothing.
    """
    if HAS_LOCKS:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    folder.stat()
    return os.open(os.devnull, os.O_RDONLY)


def limit_memory(nbytes: int) -> None:
    """Limit this process's memory to ``nbytes``, where the system can limit it."""
    if sys.platform != "win32":
        resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))


def allocate(descriptor: int, nbytes: int) -> None:
    """Make an open file ``nbytes`` long. Raises OSError where the disk lacks the room; macOS and
    Windows only find that when the file is written."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:
        os.ftruncate(descriptor, nbytes)


def read_at(descriptor: int, into: memoryview, offset: int) -> int:
    """Read from ``offset`` of an open file on, and return how many bytes were read: 0 at its end.
    Threads may do so at once; without ``preadv``, one after the other. Raises OSError."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [into], offset)
    with _seeking:
        os.lseek(descriptor, offset, os.SEEK_SET)
        found = os.read(descriptor, len(into))
    into[: len(found)] = found
    return len(found)
