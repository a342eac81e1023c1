"""Sets up a process that runs a command of kvlinker and nothing else. A program that imports
kvlinker keeps its environment, its allocator and its modules."""

from __future__ import annotations

import ctypes
import os
import sys

from kvlinker.base.machine import processors
from kvlinker.base.threads import bound_spinning

ARENA_SHARERS = 8
"""The processors whose threads share an arena of GNU's C library; chosen by hand."""

M_ARENA_MAX = -8
"""The number of the option of ``mallopt`` with this name, in GNU's malloc.h."""

PRODUCTS = 256
"""The compiled products that PyTorch and oneDNN each keep, one for each number of rows; chosen by
hand. Their own 1,024 take most of a gigabyte once prompts of all lengths have come; compiling one
again takes less than a millisecond."""

_set_up = False


def set_up() -> None:
    """Set the environment and the allocator for PyTorch. Call it before PyTorch is imported.

    Variables that the user has set stay.
    """
    global _set_up
    _set_up = True
    bound_spinning()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # weights in huge pages are read faster
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(PRODUCTS))
    share_arenas()


def is_set_up() -> bool:
    """Return whether this process runs a command of kvlinker."""
    return _set_up


def share_arenas() -> None:
    """Set GNU's C library to one arena for ARENA_SHARERS processors, in place of eight for each
    processor. Memory that a thread frees then serves other threads, and lies together: a prefill of
    2,048 tokens takes 140 MB less. Other C libraries are left alone."""
    if sys.platform != "linux" or "MALLOC_ARENA_MAX" in os.environ:
        return  # ctypes finds no C library of this process on Windows
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, -(-processors() // ARENA_SHARERS))
