"""Sources of a stored chunk's bytes, so that the chunk file's readers treat files and buffers
alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.system import read_at

Bytes = NDArray[np.uint8]


class ByteSource(Protocol):
    """A fixed number of bytes that can be read in any order, by any thread."""

    @property
    def size(self) -> int:
        """The number of bytes."""

    def read(self, offset: int, length: int) -> Bytes:
        """Return these bytes, which do not change from then on.

        Raises EOFError if they turn out to be fewer, and OSError.
        """


class BufferSource:
    """Bytes in memory; reads are views of them."""

    def __init__(self, data: Bytes) -> None:
        self._data = data

    @property
    def size(self) -> int:
        return len(self._data)

    def read(self, offset: int, length: int) -> Bytes:
        if offset + length > self.size:
            raise EOFError
        return self._data[offset : offset + length]


class FileSource:
    """The bytes of an open file; reads are views of one buffer of the file's size."""

    def __init__(self, file: BinaryIO) -> None:
        self._descriptor = file.fileno()
        # NumPy asks for huge pages, which makes fresh memory less than half as expensive as
        # torch.empty's.
        self._data: Bytes = np.empty(os.fstat(self._descriptor).st_size, dtype=np.uint8)

    @property
    def size(self) -> int:
        return len(self._data)

    def read(self, offset: int, length: int) -> Bytes:
        part = self._data[offset : offset + length]
        done = 0
        while done < length:
            count = read_at(self._descriptor, part.data[done:], offset + done)
            if not count:
                raise EOFError
            done += count
        return part


class ReadAheadSource:
    """Bytes behind a slow connection, read by one thread at a time.

    Each round trip fetches more than was asked for, up to a multiple of ``ahead_bytes``, since the
    next read usually follows; bytes that were fetched ahead are not fetched again.
    """

    def __init__(self, size: int, fetch: Callable[[int, int], Bytes], *, ahead_bytes: int) -> None:
        """Begin with nothing read. ``fetch`` takes (offset, length); its exceptions pass
        through."""
        self._size = size
        self._fetch = fetch
        self._ahead_bytes = ahead_bytes
        self._begin = 0
        self._data: Bytes = np.empty(0, dtype=np.uint8)

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> Bytes:
        if offset + length > self._size:
            raise EOFError
        first = offset - self._begin
        there = self._data[first : first + length] if first >= 0 else self._data[:0]
        if len(there) == length:
            return there
        begin, end = offset + len(there), offset + length
        ahead = -(-end // self._ahead_bytes) * self._ahead_bytes
        self._data, self._begin = self._fetch(begin, min(ahead, self._size) - begin), begin
        fetched = self._data[: end - begin]
        return np.concatenate([there, fetched]) if len(there) else fetched
