"""Computes attention: by PyTorch's kernels, or by a C++ kernel on CPUs that multiply bfloat16."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kvlinker.embedded.attention import native
from kvlinker.embedded.attention.grouping import QueryGroup, group_queries, group_requests
from kvlinker.embedded.attention.native import NativeUnavailableError
from kvlinker.embedded.attention.torch_kernels import attend
from kvlinker.embedded.batch import Batch
from kvlinker.embedded.model.anatomy import LayerShape
from kvlinker.engine.attention import AttentionOptions, Queries

logger = logging.getLogger(__name__)

LARGEST_ERROR = 2e-2
"""The largest relative error ‖native − torch‖ / ‖torch‖ with which native code is used; in bf16 it is around 3e-3."""


class AttentionKernel(Protocol):
    """Computes the attention of a batch, group by group."""

    def group(self, batch: Batch, device: torch.device) -> tuple[QueryGroup, ...]:
        """Return the batch's queries in the groups that this kernel computes fastest."""
        ...

    def attend(
        self, queries: Queries, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, *, output: Tensor
    ) -> None:
        """Write causal attention to ``output`` [heads, queries, value_dim]; the other arguments are those of
        ``torch_kernels.attend``."""
        ...


class TorchAttention:
    """Attention by PyTorch's kernels, on all devices and in all dtypes."""

    def group(self, batch: Batch, device: torch.device) -> tuple[QueryGroup, ...]:
        return group_queries(batch, device)

    def attend(
        self, queries: Queries, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, *, output: Tensor
    ) -> None:
        output.copy_(attend(queries, query, key, value, options))


class NativeAttention:
    """Attention by ``native/attention.cpp``, in bf16 on CPUs with AVX512-BF16, for keys of even width.

    It reads keys and values in the pool without a copy, and needs no mask however the queries are scattered. There is
    no fp32 variant: models run in fp32 where the CPU does not multiply bf16, and there this code does not run either.
    """

    def __init__(self) -> None:
        """Compile or load the native code. Raises NativeUnavailableError where the CPU or the compiler does not fit."""
        if not torch.cpu._is_avx512_bf16_supported():
            raise NativeUnavailableError("the CPU has no AVX512-BF16")
        if torch.cpu._is_amx_tile_supported():
            raise NativeUnavailableError("the CPU has AMX, which PyTorch's kernels use")
        self._compute = native.load_library(Path(native.__file__).with_name("attention.cpp")).kvlinker_attention
        self._compute.argtypes = [ctypes.POINTER(_Call)]
        self._compute.restype = None

    def group(self, batch: Batch, device: torch.device) -> tuple[QueryGroup, ...]:
        return group_requests(batch)

    def attend(
        self, queries: Queries, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, *, output: Tensor
    ) -> None:
        positions = queries.positions.contiguous()
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        call = _Call(
            query=_heads(query),
            key=_heads(key),
            value=_heads(value),
            output=_heads(output),
            positions=positions.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            scale=options.scale,
            softcap=options.softcap or 0.0,
            window=options.window or 0,
            threads=torch.get_num_threads(),
        )
        self._compute(call)


def choose_kernel(
    layers: Sequence[LayerShape], *, dtype: torch.dtype, device: torch.device, use_native: bool = True
) -> AttentionKernel:
    """Return the fastest kernel for a model with these layers. Native code is compiled when it is first needed."""
    fits = device.type == "cpu" and dtype == torch.bfloat16 and all(layer.key_dim % 2 == 0 for layer in layers)
    if fits and use_native:
        return _native_or_torch()
    return TorchAttention()


@functools.cache
def _native_or_torch() -> AttentionKernel:
    try:
        kernel = NativeAttention()
        _check(kernel)
    except NativeUnavailableError as error:
        logger.info("Attention takes PyTorch's kernels: %s.", error)
        return TorchAttention()
    return kernel


def _check(kernel: NativeAttention) -> None:
    """Compare with PyTorch on a small case. Raises NativeUnavailableError where they differ."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.cat([torch.arange(3, 160, 7), torch.arange(170, 211)])

    def random(heads: int, rows: int) -> Tensor:
        return torch.randn(heads, rows, 64, generator=generator).bfloat16()

    query, key, value = random(6, len(positions)), random(2, 211), random(2, 211)
    queries, options = Queries(positions), AttentionOptions(scale=0.125)
    ours = torch.empty_like(query)
    kernel.attend(queries, query, key, value, options, output=ours)
    expected = attend(queries, query, key, value, options).float()
    error = float((ours.float() - expected).norm() / expected.norm())
    if not error <= LARGEST_ERROR:
        raise NativeUnavailableError(f"the native kernel is wrong on this machine, by {error:.1e}")


class _Heads(ctypes.Structure):
    """The struct ``Heads`` of attention.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
    )


class _Call(ctypes.Structure):
    """The struct ``Call`` of attention.cpp."""

    _fields_ = (
        ("query", _Heads),
        ("key", _Heads),
        ("value", _Heads),
        ("output", _Heads),
        ("positions", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )


def _heads(tensor: Tensor) -> _Heads:
    """Describe a bf16 tensor [heads, rows, dim] in the CPU's memory to native code."""
    assert tensor.dtype == torch.bfloat16, tensor.dtype
    assert tensor.stride(2) == 1, tensor.stride()
    return _Heads(tensor.data_ptr(), *tensor.shape, *tensor.stride()[:2])
