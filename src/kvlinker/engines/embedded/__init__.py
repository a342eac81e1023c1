"""The engine in this process: a thin core over unmodified Hugging Face models."""

import os

# Before PyTorch takes its first memory: weights that lie in huge pages are read faster.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# PyTorch and oneDNN each keep a compiled product for every number of rows that came up, 1024 by
# default. They take most of a gigabyte once prompts of all lengths have come, and to compile one
# anew takes less than a millisecond.
for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(name, "256")
