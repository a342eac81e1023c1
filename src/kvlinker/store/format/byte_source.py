"""Gives the bytes of a stored chunk to the chunk file's readers, which see files and buffers alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

AHEAD_BYTES = 8 << 20
"""Bytes that one round trip brings, about."""


class ByteSource(Protocol):
    """Gives a fixed number of bytes, in any order, to any thread."""

    @property
    def size(self) -> int:
        """The number of bytes."""
        ...

    def read(self, offset: int, length: int) -> Bytes:
        """Return these bytes, which nobody else changes from then on.

        Raises EOFError where they turn out to be fewer, and OSError.
        """
        ...


class BufferSource:
    """Gives bytes in memory; what is read is a view of them."""

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
    """Gives the bytes of an open file; what is read are views of one buffer of the file's size."""

    def __init__(self, file: BinaryIO) -> None:
        self._descriptor = file.fileno()
        # NumPy asks for huge pages, which makes fresh memory less than half as expensive as torch.empty's.
        self._data: Bytes = np.empty(os.fstat(self._descriptor).st_size, dtype=np.uint8)

    @property
    def size(self) -> int:
        return len(self._data)

    def read(self, offset: int, length: int) -> Bytes:
        part = self._data[offset : offset + length]
        done = 0
        while done < length:
            count = os.preadv(self._descriptor, [part.data[done:]], offset + done)
            if not count:
                raise EOFError
            done += count
        return part


class AheadSource:
    """Gives bytes that are far away, to one thread at a time.

    Each round trip brings more than was asked for, for the next read most often follows.
    """

    def __init__(self, size: int, fetch: Callable[[int, int], Bytes], *, ahead_bytes: int = AHEAD_BYTES) -> None:
        """Begin with nothing read. ``fetch`` takes (offset, length); what it raises, reading raises."""
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
        if not self._begin <= offset <= offset + length <= self._begin + len(self._data):
            alike = max(1, self._ahead_bytes // max(1, length))  # the next reads are often as long as this one
            self._data = self._fetch(offset, min(alike * length, self._size - offset))
            self._begin = offset
        return self._data[offset - self._begin : offset - self._begin + length]
