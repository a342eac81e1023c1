"""Weights in 8 and 4 bits in the blocks of ``native/products.cpp``: faster than PyTorch's kernels
for any rows."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from kvlinker.engines.embedded.model.weights.blocks import BLOCK, code_blocks, codes_of, padded
from kvlinker.engines.embedded.model.weights.matrices import ROWS_AT_ONCE, Matrix, NativeWeights
from kvlinker.engines.embedded.model.weights.native_products import Form, native_products
from kvlinker.engines.embedded.model.weights.quantized import (
    finished,
    int4_codes,
    int4_group,
    int8_codes,
)


class CodesMatrix(Matrix):
    """Holds a weight whose codes lie in blocks of 64 outputs; each block has groups of inputs, each
    with a header."""

    FORM: ClassVar[Form]
    """The name of the product that native code computes."""

    BITS: ClassVar[int]
    """The bits of a code."""

    AMX_FROM = 32
    """The number of rows from which on, where there is AMX, oneDNN by the whole matrix in bf16 is
    faster."""

    def __init__(self, blocks: Tensor, shape: torch.Size, group: int) -> None:
        """``blocks`` [blocks, groups, bytes of a group] hold a weight of this shape, [outputs,
        inputs]."""
        super().__init__()
        self.outputs, self.inputs = shape
        self.group = group
        self.register_buffer("blocks", blocks)
        self.blocks: Tensor
        self._dense_from = self.AMX_FROM if torch.cpu._is_amx_tile_supported() else None

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        rows = inputs.reshape(-1, self.inputs).bfloat16()
        if self._dense_from is not None and len(rows) >= self._dense_from:
            output = nn.functional.linear(rows, self.dense())
        else:
            products = native_products()
            assert products is not None, "weights were packed for a processor with native code"
            output = products.multiply(
                self.FORM, rows, self.blocks.data_ptr(), self.outputs, group=self.group, bias=None
            )
        return finished(output, inputs, bias)

    def native(self) -> NativeWeights | None:
        if self._dense_from is not None:
            return None
        address = self.blocks.data_ptr()
        return NativeWeights(self.FORM, address, self.outputs, self.inputs, self.group, True)


class NativeInt8Matrix(CodesMatrix):
    """Holds a weight in 8 bits, with a scale per output."""

    FORM = "int8"
    BITS = 8

    def __init__(self, weight: Tensor) -> None:
        blocks = []
        for rows in torch.split(weight.detach(), ROWS_AT_ONCE):
            codes, scales = int8_codes(padded(rows))
            headers = scales.view(-1, 1, BLOCK)
            blocks.append(code_blocks(headers, codes.int() & 255, self.BITS))
        super().__init__(torch.cat(blocks), weight.shape, weight.shape[1])

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Tell whether a weight of this shape can be packed."""
        return weight.shape[1] % 4 == 0

    def dense(self) -> Tensor:
        headers = BLOCK * torch.bfloat16.itemsize
        scales = self.blocks[:, :, :headers].contiguous().view(torch.bfloat16).view(-1, 1)
        codes = (
            codes_of(self.blocks, self.BITS, header_bytes=headers).to(torch.uint8).view(torch.int8)
        )
        return (codes.bfloat16() * scales)[: self.outputs]


class NativeInt4Matrix(CodesMatrix):
    """Holds a weight in 4 bits, with a scale and a zero point per output and group of 64 or 32
    inputs."""

    FORM = "int4"
    BITS = 4

    def __init__(self, weight: Tensor) -> None:
        group = int4_group(weight.shape[1])
        blocks = []
        for rows in torch.split(weight.detach(), ROWS_AT_ONCE):
            codes, grids = int4_codes(padded(rows), group)  # grids: [groups, outputs, 2]
            headers = grids.view(len(grids), -1, BLOCK, 2).permute(1, 0, 3, 2)
            blocks.append(code_blocks(headers.flatten(2), codes, self.BITS))
        super().__init__(torch.cat(blocks), weight.shape, group)

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Tell whether a weight of this shape can be packed."""
        return weight.shape[1] % 32 == 0

    def dense(self) -> Tensor:
        headers = 2 * BLOCK * torch.bfloat16.itemsize
        grids = (
            self.blocks[:, :, :headers]
            .contiguous()
            .view(torch.bfloat16)
            .view(len(self.blocks), -1, 2, BLOCK)
        )
        scales, middles = grids.transpose(1, 3).flatten(0, 1).unbind(1)  # [padded outputs, groups]
        codes = (codes_of(self.blocks, self.BITS, header_bytes=headers) - 8).bfloat16()
        widened = torch.addcmul(
            middles[..., None], codes.view(len(scales), -1, self.group), scales[..., None]
        )
        return widened.flatten(1)[: self.outputs]
