"""PyTorch, imported at its first use: commands that only look into a state directory do without
it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("torch"), name)

    torch = _Torch()
