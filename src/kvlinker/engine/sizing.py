"""How large the KV pool is when nobody says."""

from __future__ import annotations

import psutil
import torch

from kvlinker.engine.loading import LoadedModel
from kvlinker.errors import ModelLoadError

POOL_SHARE = 0.25
"""Part of the available memory that the pool takes."""

POOL_WINDOWS = 16
"""Context windows that it holds at most."""

FEWEST_SLOTS = 1024
"""A pool smaller than this, and than a context window, is refused."""


def default_slots(loaded: LoadedModel, window: int) -> int:
    """Slots of the pool, for requests of up to ``window`` tokens. Raises ModelLoadError when memory is too tight."""
    available = psutil.virtual_memory().available
    if loaded.device.type == "cuda":
        available = torch.cuda.mem_get_info(loaded.device)[0]
    affordable = int(available * POOL_SHARE) // loaded.kv_bytes_per_token
    if affordable < min(window, FEWEST_SLOTS):
        raise ModelLoadError(
            f"A quarter of the {available / 2**30:.1f} GiB of memory that is available holds the KV of {affordable} "
            "tokens only. Free memory, or set kv_slots."
        )
    return min(affordable, POOL_WINDOWS * window)
