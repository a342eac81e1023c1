"""Detects now and then the changes of other processes in a folder of chunk files; ``IndexedFolder``
is the only caller."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

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
