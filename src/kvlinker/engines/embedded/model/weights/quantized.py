"""Weights in 8 and 4 bits, which are widened as they are multiplied by; activations stay in 16
bits.

Without native code the kernels are PyTorch's own. They compute in bf16, so that inputs in
other precisions are rounded to it. They are made for decoding: from a number of rows on, it is
faster to widen the whole matrix first.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from kvlinker.base.errors import ModelLoadError
from kvlinker.engines.embedded.model.weights.matrices import ROWS_AT_ONCE, Matrix

INT4_GROUPS = (64, 32)
"""The numbers of neighbouring inputs that share a scale and a zero point; the first that divides
all is taken."""

INT4_OUTPUTS = 16
"""The kernel for 4 bits takes a multiple of this number of outputs."""

INT8_INPUTS = 32
"""The kernel for 8 bits takes a multiple of this number of inputs."""

_BLOCKS = (64, 32)
"""The outputs that kernels pack together in 4 bits: with AVX-512, and with AVX2."""


class Int8Matrix(Matrix):
    """Holds a weight in 8 bits, with a scale per output."""

    WIDENED_FROM = 12
    """The number of rows from which on the matrix is widened as a whole."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        codes, scales = [], []
        for rows in torch.split(weight.detach(), ROWS_AT_ONCE):
            some, theirs = int8_codes(rows)
            codes.append(some)
            scales.append(theirs)
        self.register_buffer("codes", torch.cat(codes))  # [outputs, inputs]
        self.register_buffer("scales", torch.cat(scales))  # [outputs]
        self.codes: Tensor
        self.scales: Tensor

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Return whether the kernel takes a weight of this shape."""
        return weight.shape[1] % INT8_INPUTS == 0

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1]).bfloat16()
        if len(rows) < self.WIDENED_FROM:
            output = torch.ops.aten._weight_int8pack_mm.default(rows, self.codes, self.scales)
        else:
            output = nn.functional.linear(rows, self.codes.bfloat16()) * self.scales
        return finished(output, inputs, bias)

    def dense(self) -> Tensor:
        return self.codes.bfloat16() * self.scales[:, None]


class Int4Matrix(Matrix):
    """Holds a weight in 4 bits, with a scale and a zero point per output and group of 64 or 32
    inputs."""

    WIDENED_FROM = 160
    """The number of rows from which on the matrix is widened as a whole."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._group = int4_group(weight.shape[1])
        packed, grids = [], []
        for rows in torch.split(weight.detach(), ROWS_AT_ONCE):
            codes, grid = int4_codes(rows, self._group)
            packed.append(_packed(codes))
            grids.append(grid.bfloat16())
        self.register_buffer("packed", torch.cat(packed))
        self.register_buffer(
            "grids", torch.cat(grids, dim=1)
        )  # [groups, outputs, 2]: scale, what code 8 means
        self.packed: Tensor
        self.grids: Tensor
        block = _rows_packed_together()
        self._block = block if block is not None and len(weight) % block == 0 else None

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Return whether the kernel takes a weight of this shape."""
        outputs, inputs = weight.shape
        return outputs % INT4_OUTPUTS == 0 and inputs % INT4_GROUPS[-1] == 0

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1]).bfloat16()
        if len(rows) < self.WIDENED_FROM or self._block is None:
            output = torch.ops.aten._weight_int4pack_mm_for_cpu.default(
                rows, self.packed, self._group, self.grids
            )
        else:
            output = nn.functional.linear(rows, self._widened(self._block))
        return finished(output, inputs, bias)

    def dense(self) -> Tensor:
        if self._block is not None:
            return self._widened(self._block)
        identity = torch.eye(self.grids.shape[0] * self._group, dtype=torch.bfloat16)
        return self.multiply(identity, None).T.contiguous()

    def _widened(self, block: int) -> Tensor:
        """Return the weight in bf16, [outputs, inputs]."""
        codes = (
            _unpacked(self.packed, block).view(torch.int8).sub_(8).bfloat16()
        )  # [blocks, inputs, block]
        groups = len(self.grids)
        grids = self.grids.view(groups, -1, block, 2).transpose(0, 1)[
            :, :, None
        ]  # [blocks, groups, 1, block, 2]
        scales, middles = (part.contiguous() for part in grids.unbind(-1))
        widened = torch.addcmul(middles, codes.view(len(codes), groups, self._group, block), scales)
        return widened.flatten(1, 2).transpose(1, 2).flatten(0, 1)


def _packed(codes: Tensor) -> Tensor:
    """Return codes [outputs, inputs], int32, in the order in which this processor's kernel takes
    them."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return packed


def _unpacked(packed: Tensor, block: int) -> Tensor:
    """Return the codes [blocks, inputs, block] from their packed order: of each ``block`` of
    outputs, input by input, the first half in the low bits of its bytes and the second half in the
    high bits."""
    pairs = packed.view(-1, 2 * packed.shape[1], block // 2)  # [blocks, inputs, pairs]
    return torch.cat([pairs & 15, pairs >> 4], dim=-1)


@cache
def _rows_packed_together() -> int | None:
    """Return the block of outputs for which ``_unpacked`` knows this processor's order; None if it
    does not."""
    codes = torch.randint(
        16, (2 * max(_BLOCKS), 64), dtype=torch.int32, generator=torch.Generator().manual_seed(0)
    )
    packed = _packed(codes)
    unpacked = (
        (block, _unpacked(packed, block).transpose(1, 2).flatten(0, 1)) for block in _BLOCKS
    )
    return next((block for block, found in unpacked if torch.equal(found, codes)), None)


def int8_codes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes -127 to 127 of ``rows`` [outputs, inputs], int8, and their scales [outputs],
    bf16."""
    scales = (
        rows.float()
        .abs()
        .amax(dim=1)
        .div_(127)
        .clamp_min_(torch.finfo(torch.float32).tiny)
        .bfloat16()
    )
    codes = (rows.float() / scales.float()[:, None]).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scales


def int4_group(inputs: int) -> int:
    """Return how many neighbouring inputs of ``inputs`` share a scale."""
    return next(group for group in INT4_GROUPS if inputs % group == 0)


def int4_codes(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the codes 0 to 15 of ``rows`` [outputs, inputs], int32, and their grids [groups,
    outputs, 2]: a group's scale, and what code 8 means."""
    groups = rows.float().view(len(rows), -1, group)
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    scale = ((high - low) / 15).clamp_min_(torch.finfo(torch.bfloat16).tiny).bfloat16().float()
    middle = (low + 8 * scale).bfloat16().float()
    codes = ((groups - middle) / scale + 8).round_().clamp_(0, 15).flatten(1).to(torch.int32)
    return codes, torch.stack([scale[..., 0].T, middle[..., 0].T], dim=-1)


def finished(output: Tensor, inputs: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``output`` [rows, outputs] in the shape and precision of ``inputs`` [..., inputs],
    plus the bias."""
    shaped = output.to(inputs.dtype).view(*inputs.shape[:-1], output.shape[-1])
    return shaped if bias is None else shaped + bias


def quantise_by_torchao(model: nn.Module, chosen: Collection[nn.Linear], bits: int) -> None:
    """Give the ``chosen`` layers weights in ``bits`` bits, on a device other than the CPU.

    Raises ModelLoadError if torchao is not installed.
    """
    if find_spec("torchao") is None:
        raise ModelLoadError(
            f"int{bits} weights on a GPU need torchao: run pip install torchao, or set weights to"
            " auto."
        )
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    config = (
        Int8WeightOnlyConfig() if bits == 8 else Int4WeightOnlyConfig(group_size=INT4_GROUPS[0])
    )
    quantize_(model, config, filter_fn=lambda module, name: module in chosen)
