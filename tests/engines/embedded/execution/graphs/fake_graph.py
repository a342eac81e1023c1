"""A graph that a CPU passes for: what is launched while it is captured, again, with results in the
same memory, and nothing of Python in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvlinker.engines.embedded.attention import triton_attention
from kvlinker.engines.gpu import launching

KERNELS = [(triton_attention, "attend_tile"), (triton_attention, "merge_partials")]
KERNELS += [(launching, "place_tokens")]

ATEN = torch.ops.aten
WAITS = [ATEN._local_scalar_dense.default, ATEN.nonzero.default, ATEN.equal.default]
"""Operations that wait for a GPU, and cannot be captured."""


class FakeCapture:
    """Captures what runs on a CPU: PyTorch's operations, and kernels that Triton interprets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[Callable[[], object]] | None = None
        self.captures = 0
        for module, name in KERNELS:
            monkeypatch.setattr(module, name, _Kernel(getattr(module, name), self))

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        self.captures += 1
        launches: list[Callable[[], object]] = []
        self.launches = launches
        try:
            with _Recording(launches):
                result = compute()
        finally:
            self.launches = None
        result.fill_(float("nan"))  # a graph's results are there once it has run
        return lambda: [launch() for launch in launches], result


class _Kernel:
    """A kernel whose launches are captured."""

    def __init__(self, kernel: Any, capture: FakeCapture) -> None:
        self._kernel = kernel
        self._capture = capture

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            if self._capture.launches is None:
                self._kernel[grid](*args, **kwargs)
            else:
                self._capture.launches.append(lambda: self._kernel[grid](*args, **kwargs))

        return launch


class _Recording(TorchDispatchMode):
    def __init__(self, launches: list[Callable[[], object]]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITS:
            raise RuntimeError(f"{func} waits for the device")
        results = func(*args, **(kwargs or {}))

        def again() -> None:
            for old, new in zip(
                tree_leaves(results), tree_leaves(func(*args, **(kwargs or {}))), strict=True
            ):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self._launches.append(again)
        return results
