"""Imports transformers without the libraries and tables that kvlinker does not use, in processes
that run a command of kvlinker: these take more than half of the time until a model is read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any
from unittest.mock import patch

from kvlinker.base import own_process

FAMILIES, DISTRIBUTED = "transformers.models", "torch.distributed.tensor"

COMPILER, INDICES = "torch._dynamo", "torch._dynamo._trace_wrapped_higher_order_op"
"""PyTorch's compiler, and its module of a class that transformers uses without compiling."""


def import_transformers() -> None:
    """Import transformers without SciPy and scikit-learn, which are for losses and assisted
    generation; where PyTorch was built for CPUs alone, without Triton; and without PyTorch's
    compiler and distributed tensors. They take 250 MB.

    Other code can import them afterwards, and use all but distributed tensors where PyTorch was
    built for CPUs alone. Transformers takes them for not installed in this process, so this is for
    kvlinker's own, and only where transformers has not looked for them yet: vLLM imports it first.
    """
    import torch

    built_for = (getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu"))
    for_cpus = not any(built_for)
    hidden = {"scipy", "sklearn", "triton"} if for_cpus else {"scipy", "sklearn"}
    hidden -= sys.modules.keys()
    if for_cpus:
        _forgo_distributed_tensors()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    # Transformers reads all packages' lists of files to learn which brought which module, and needs
    # that to tell the kinds of flash attention apart, which are for GPUs.
    known = {} if for_cpus else metadata.packages_distributions()
    try:
        with without_compiler(), patch.object(metadata, "packages_distributions", lambda: known):
            import transformers

            sys.modules.setdefault(FAMILIES, _families(transformers))
            from transformers.utils.import_utils import is_torch_distributed_available

            is_torch_distributed_available()  # which remembers the answer
            import transformers.modeling_utils
            import transformers.models.auto.modeling_auto
    finally:
        torch.distributed.is_available = is_available
        for library in hidden:
            del sys.modules[library]


def _families(transformers: ModuleType) -> ModuleType:
    """Return the package of transformers' families, which finds each where it is asked for.
    Transformers' own first reads all files of all families, as the package around it has done."""
    spec = find_spec(FAMILIES)
    assert spec is not None, "transformers has families"
    families = module_from_spec(spec)

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return import_module(f"{FAMILIES}.{name}")
        except ModuleNotFoundError:
            return getattr(transformers, name)

    families.__dict__["__getattr__"] = find
    return families


def _forgo_distributed_tensors() -> None:
    """Let PyTorch tell distributed tensors from others without importing them: it asks for their
    class at the first function of any class of tensors, such as weights in codes, and remembers
    it. Distributed tensors do not work in this process then."""
    import torch

    class Probe(torch.Tensor):
        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return args[0]

    distributed = ModuleType(DISTRIBUTED)
    distributed.__dict__["DTensor"] = type("DTensor", (), {})
    if sys.modules.setdefault(DISTRIBUTED, distributed) is distributed:
        probe = torch.Tensor._make_wrapper_subclass(Probe, (1,))
        probe.detach()
        del sys.modules[DISTRIBUTED]


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
