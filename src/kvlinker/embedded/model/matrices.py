"""Weights of linear layers, in the order in which a processor reads them fastest."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

PADDED_ROWS = 4
"""The rows that one row is computed as, in fp32 with AVX-512: oneDNN reads the weights faster than for one."""


class Matrix(nn.Module):
    """A linear layer's weight [outputs, inputs], ready to be multiplied by; there are no gradients."""

    @abstractmethod
    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``inputs`` [..., inputs] times the weight transposed, plus ``bias`` [outputs]: [..., outputs]."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return a plain copy of the weight, [outputs, inputs]."""

    def _save_to_state_dict(self, *args: object) -> None:
        """Write nothing: the linear layers that use the matrix write it as their weights."""


class PackedMatrix(Matrix):
    """A weight in oneDNN's order. In bf16, what comes out is bit-identical to a plain weight's."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self._pads = weight.dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() == "AVX512"

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        if self._pads and inputs.numel() == inputs.shape[-1]:
            padded = inputs.reshape(1, -1).expand(PADDED_ROWS, -1).contiguous()
            return _linear(padded, self.packed, bias)[0].view(*inputs.shape[:-1], -1)
        return _linear(inputs, self.packed, bias)

    def dense(self) -> Tensor:
        return self.packed.to_dense()


def _linear(inputs: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise.default(inputs, packed, bias, "none", [], "")
    return output


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether oneDNN multiplies by packed weights of this dtype here, and faster than by plain ones."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    capability = torch.backends.cpu.get_cpu_capability()
    if dtype == torch.float32:
        return capability in ("AVX512", "AVX2")
    if capability != "AVX512":
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False
