"""The engine in this process: a thin core over unmodified Hugging Face models."""

import ctypes
import os
import sys

from kvlinker.base.machine import processors
from kvlinker.engines.embedded.lean_imports import import_transformers, is_own_process

ARENA_SHARERS = 8
"""The processors whose threads share an arena of GNU's C library."""

M_ARENA_MAX = -8
"""The number of the option of ``mallopt`` that is called so."""

# Before PyTorch takes its first memory: weights that lie in huge pages are read faster.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# PyTorch and oneDNN each keep a compiled product for every number of rows that came up, 1024 by
# default. They take most of a gigabyte once prompts of all lengths have come, and to compile one
# anew takes less than a millisecond.
for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(name, "256")


def _share_arenas() -> None:
    """Have GNU's C library make one arena for ARENA_SHARERS processors in place of eight for each:
    what a thread frees serves others, too, and lies together, which takes 140 MB less in a prefill
    of 2,048 tokens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(M_ARENA_MAX, -(-processors() // ARENA_SHARERS))


_share_arenas()
if is_own_process() and "transformers" not in sys.modules:
    import_transformers()
