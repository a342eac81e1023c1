"""Products with weights by ``native/products.cpp``: bf16, 8 and 4 bits, on CPUs with AVX512-BF16."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from kvlinker.embedded import native
from kvlinker.embedded.native import NativeUnavailableError

Form = Literal["bf16", "int8", "int4"]
"""What the weights are in."""

BLOCK = 64
"""The outputs that lie together; the last block is filled with zeros."""

LARGEST_ERROR = 1e-2
"""‖ours − expected‖ / ‖expected‖ beyond which native code is not trusted; in bf16 it is around 2e-3."""

logger = logging.getLogger(__name__)


class NativeProducts:
    """Multiplies rows by a matrix of weights whose blocks products.cpp describes."""

    def __init__(self) -> None:
        """Raises NativeUnavailableError."""
        if not torch.cpu._is_avx512_bf16_supported():
            raise NativeUnavailableError("the CPU has no AVX512-BF16")
        library = native.load_library(Path(native.__file__).with_name("products.cpp"))
        self._functions = {form: getattr(library, f"kvlinker_multiply_{form}") for form in get_args(Form)}
        for function in self._functions.values():
            function.argtypes = [ctypes.POINTER(_Product)]
            function.restype = None

    def multiply(
        self,
        form: Form,
        inputs: Tensor,
        weights: int,
        outputs: int,
        *,
        group: int,
        bias: Tensor | None,
    ) -> Tensor:
        """Return ``inputs`` [..., width], bf16, times the weights, plus ``bias`` [outputs]: [..., outputs], bf16.

        ``weights`` is the address of the blocks, and ``group`` the number of neighbouring inputs that share a header.
        Sums are fp32.
        """
        inputs = inputs.contiguous()
        assert inputs.dtype == torch.bfloat16, inputs.dtype
        assert bias is None or (bias.dtype == torch.bfloat16 and bias.is_contiguous()), bias
        width = inputs.shape[-1]
        output = torch.empty((*inputs.shape[:-1], outputs), dtype=torch.bfloat16)
        product = _Product(
            inputs=inputs.data_ptr(),
            rows=inputs.numel() // width,
            width=width,
            weights=weights,
            outputs=outputs,
            group=group,
            bias=None if bias is None else bias.data_ptr(),
            output=output.data_ptr(),
            threads=torch.get_num_threads(),
        )
        self._functions[form](product)
        return output


@cache
def native_products() -> NativeProducts | None:
    """Return the native products, compiled when first asked for; None where there are none, and the log says why."""
    try:
        products = NativeProducts()
        _check(products)
    except NativeUnavailableError as error:
        logger.info("Weights are multiplied by PyTorch's kernels: %s.", error)
        return None
    return products


def _check(products: NativeProducts) -> None:
    """Compare with PyTorch on a small case. Raises NativeUnavailableError where they differ."""
    generator = torch.Generator().manual_seed(0)
    inputs, block = (torch.randn(rows, 96, generator=generator).bfloat16() for rows in (8, BLOCK))
    laid = block.view(BLOCK, -1, 2).transpose(0, 1).contiguous()
    ours = products.multiply("bf16", inputs, laid.data_ptr(), BLOCK, group=96, bias=None).float()
    expected = inputs.float() @ block.float().T
    error = float((ours - expected).norm() / expected.norm())
    if not error <= LARGEST_ERROR:
        raise NativeUnavailableError(f"native products are wrong on this machine, by {error:.1e}")


class _Product(ctypes.Structure):
    """``Product`` of products.cpp."""

    _fields_ = (
        ("inputs", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )
