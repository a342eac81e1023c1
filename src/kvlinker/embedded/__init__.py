"""The engine in this process: a thin core over unmodified Hugging Face models."""

import os

# Before PyTorch takes its first memory: weights that lie in huge pages are read faster.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
