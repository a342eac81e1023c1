"""Imports transformers without the libraries that kvlinker does not use, in processes that run a
command of kvlinker: these libraries take more than half of the time until a model is read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from kvlinker.base import own_process

COMPILER, INDICES = "torch._dynamo", "torch._dynamo._trace_wrapped_higher_order_op"
"""PyTorch's compiler, and its module of a class that transformers uses without compiling."""


def import_transformers() -> None:
    """Import transformers without SciPy and scikit-learn, which are for losses and assisted
    generation; where PyTorch was built for CPUs alone, without Triton; and without PyTorch's
    compiler and distributed tensors. They take 250 MB.

    Other code can import them afterwards. Transformers takes them for not installed in this
    process, so this is for kvlinker's own, and only where transformers has not looked for them yet:
    vLLM imports it first.
    """
    import torch

    built_for = (getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu"))
    hidden = {"scipy", "sklearn"} if any(built_for) else {"scipy", "sklearn", "triton"}
    hidden -= sys.modules.keys()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        with without_compiler():
            from transformers.utils.import_utils import is_torch_distributed_available

            is_torch_distributed_available()  # which remembers the answer
            import transformers.modeling_utils
            import transformers.models.auto.modeling_auto  # noqa: F401
    finally:
        torch.distributed.is_available = is_available
        for library in hidden:
            del sys.modules[library]


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let code in the block mark functions for PyTorch's compiler without importing it, in a
    process of the command: these functions stay as they are. All else is the compiler's."""
    if COMPILER in sys.modules or not own_process.is_set_up():
        yield
        return
    compiler, indices = ModuleType(COMPILER), ModuleType(INDICES)
    standing_in = {COMPILER: compiler, INDICES: indices}
    compiler.__path__ = []

    def unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
        return (lambda marked: marked) if function is None else function

    def transform(*given: Any, **named: Any) -> Any:
        found: Any = import_module(INDICES)
        return found.TransformGetItemToIndex(*given, **named)

    def other(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _take_out(standing_in)
        return getattr(import_module(COMPILER), name)

    for mark in ("disable", "assume_constant_result", "allow_in_graph"):
        setattr(compiler, mark, unchanged)
    compiler.__dict__["__getattr__"] = other
    indices.__dict__["TransformGetItemToIndex"] = transform
    sys.modules.update(standing_in)
    try:
        yield
    finally:
        _take_out(standing_in)


def _take_out(modules: dict[str, ModuleType]) -> None:
    for name, module in modules.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
