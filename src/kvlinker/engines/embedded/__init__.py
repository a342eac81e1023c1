"""The engine in this process: a thin core over unmodified Hugging Face models."""

import sys

from kvlinker.base import own_process
from kvlinker.engines.embedded.lean_imports import import_transformers

if own_process.is_set_up() and "transformers" not in sys.modules:
    import_transformers()
