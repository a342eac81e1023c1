"""Has Triton's interpreter compute in bfloat16, which it multiplies as whole numbers, and rounds
towards zero: NumPy has no such numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def computes_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the interpreter for one test: products of matrices are of what the bits mean, summed
    in fp32, and rounding is to the nearest, as on GPUs."""
    dot, truncate = InterpreterBuilder.create_dot, InterpreterBuilder.create_fp_trunc

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, widened(a), widened(b), *others)

    def create_fp_trunc(self: Any, source: Any, kind: Any) -> Any:
        if kind.scalar != tl.bfloat16:
            return truncate(self, source, kind)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
        bits = rounded.view(torch.uint16).numpy().reshape(source.data.shape)
        return TensorHandle(bits, tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "create_fp_trunc", create_fp_trunc)
