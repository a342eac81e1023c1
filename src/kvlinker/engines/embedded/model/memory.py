"""Returns the memory of weights that are not needed any more to the system, on Linux; elsewhere it
does nothing.

A model's plain weights lie in its files, which are mapped into memory, or in memory of the C
library. Both would keep what was read or freed: a model would take twice its size while its weights
are packed one after another.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

from torch import Tensor

_MAPPINGS = Path("/proc/self/maps")


def drop_mapped(weight: Tensor) -> None:
    """Drop a weight that is no longer read from memory, if it is in a mapped file."""
    begin, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes
    first = (
        -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    )  # its neighbours keep the pages that they share with it
    last = end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last and _in_a_file(begin, end):
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED
        )


def _in_a_file(begin: int, end: int) -> bool:
    """Return whether a file is mapped to these addresses, for this process alone. The same call
    would empty other memory."""
    if not _MAPPINGS.exists():
        return False
    for line in _MAPPINGS.read_text().splitlines():
        addresses, permissions, _, _, inode, *_ = line.split(maxsplit=5)
        low, high = (int(address, 16) for address in addresses.split("-"))
        if low <= begin and end <= high:
            return int(inode) > 0 and permissions.endswith("p")
    return False


def return_freed() -> None:
    """Have GNU's C library return the memory that it keeps for later: the holes between weights
    that were freed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
