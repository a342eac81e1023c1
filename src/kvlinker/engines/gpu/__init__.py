"""Kernels for GPUs in Triton, which CUDA builds of PyTorch include; both engines use them.

The modules here are imported on a GPU only: elsewhere, Triton need not be installed.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether these kernels run on the device."""
    return device.type == "cuda" and find_spec("triton") is not None
