"""Chooses the attention kernel: PyTorch's, or one of our own on GPUs, and in bf16 on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from kvlinker.engines import native
from kvlinker.engines.embedded.attention.kernel import AttentionKernel
from kvlinker.engines.embedded.attention.kernel_check import (
    require_right,
    require_right_weights,
)
from kvlinker.engines.embedded.attention.native_kernel import NativeAttention
from kvlinker.engines.embedded.attention.torch_kernels import TorchAttention
from kvlinker.engines.embedded.model.anatomy import LayerShape
from kvlinker.engines.gpu import has_kernels
from kvlinker.engines.native import NativeUnavailableError


def choose_kernel(
    layers: Sequence[LayerShape],
    *,
    dtype: torch.dtype,
    device: torch.device,
    use_native: bool = True,
) -> AttentionKernel:
    """Return the quickest kernel for a model with these layers. Native code is compiled when it is
    first wanted."""
    kernel: AttentionKernel | None = None
    if use_native:
        if has_kernels(device):
            kernel = triton_attention(dtype, device) if _fit(layers) else None
        elif not torch.cpu._is_amx_tile_supported():  # which PyTorch's use for many queries
            kernel = step_kernel(layers, dtype=dtype, device=device)
    return kernel or TorchAttention()


def step_kernel(
    layers: Sequence[LayerShape], *, dtype: torch.dtype, device: torch.device
) -> NativeAttention | None:
    """Return the kernel of steps that native code computes, which are of few queries; None if it
    does not attend for a model with these layers."""
    fits = device.type == "cpu" and dtype == torch.bfloat16 and _fit(layers)
    return native_attention() if fits else None


def _fit(layers: Sequence[LayerShape]) -> bool:
    return bool(layers) and all(
        layer.key_dim % 2 == 0 and (layer.rotary is None or layer.rotary.pairing is not None)
        for layer in layers
    )


@cache
def triton_attention(dtype: torch.dtype, device: torch.device) -> AttentionKernel | None:
    """Return the kernel for GPUs, checked when first asked for; None if it does not work, and the
    log says why."""

    def checked() -> AttentionKernel:
        try:
            from kvlinker.engines.embedded.attention.triton_attention import TritonAttention

            kernel = TritonAttention()
            require_right(kernel, dtype, device)
        except NativeUnavailableError:
            raise
        except Exception as error:  # whatever the compiler or the driver raises
            raise NativeUnavailableError(f"{type(error).__name__}: {error}") from error
        return kernel

    return native.or_fall_back(checked, "Attention takes PyTorch's kernels")


@cache
def native_attention() -> NativeAttention | None:
    """Return the native kernel, compiled when first asked for; None if there is none, and the log
    says why."""
    return native.or_fall_back(_checked, "Attention takes PyTorch's kernels")


def _checked() -> NativeAttention:
    kernel = NativeAttention()
    require_right(kernel, torch.bfloat16, torch.device("cpu"))
    require_right_weights(kernel)
    return kernel
