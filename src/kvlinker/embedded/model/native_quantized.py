"""Weights in 8 and 4 bits in the blocks of ``native/products.cpp``: faster than PyTorch's kernels for any rows."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from kvlinker.embedded.model.matrices import Matrix
from kvlinker.embedded.model.native_products import BLOCK, Form, native_products
from kvlinker.embedded.model.quantized import ROWS_AT_ONCE, finished, int4_codes, int4_group, int8_codes

LANES = 16
"""The outputs whose weights a vector holds."""


class BlockedMatrix(Matrix):
    """A weight whose codes lie in blocks of 64 outputs; each block has groups of inputs, each with a header."""

    FORM: ClassVar[Form]
    BITS: ClassVar[int]

    WIDENED_FROM = 32
    """The number of rows from which on the matrix is widened as a whole where there is AMX, which is faster then."""

    def __init__(self, blocks: Tensor, shape: torch.Size, group: int) -> None:
        """``blocks`` [blocks, groups, bytes of a group] hold a weight of this shape, [outputs, inputs]."""
        super().__init__()
        self.outputs, self.inputs = shape
        self.group = group
        self.register_buffer("blocks", blocks)
        self.blocks: Tensor
        self._widened_from = self.WIDENED_FROM if torch.cpu._is_amx_tile_supported() else None

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        rows = inputs.reshape(-1, self.inputs).bfloat16()
        if self._widened_from is not None and len(rows) >= self._widened_from:
            output = nn.functional.linear(rows, self.dense())
        else:
            products = native_products()
            assert products is not None, "weights were packed for a processor that multiplies bf16"
            output = products.multiply(
                self.FORM, rows, self.blocks.data_ptr(), self.outputs, group=self.group, bias=None
            )
        return finished(output, inputs, bias)

    def _codes(self, headers: int) -> Tensor:
        """Return the codes [padded outputs, inputs], unsigned; a group's header has this many bytes."""
        words = self.blocks[:, :, headers:].contiguous().view(torch.int16).int()
        pairs = 16 // self.BITS
        apart = torch.stack([words >> self.BITS * pair & 2**self.BITS - 1 for pair in range(pairs)], dim=-1)
        lanes = apart.view(len(words), -1, BLOCK // LANES, LANES, 2, pairs)  # blocks, steps, vectors, outputs, inputs
        return lanes.permute(0, 2, 3, 1, 5, 4).reshape(len(words) * BLOCK, self.inputs)


class NativeInt8Matrix(BlockedMatrix):
    """A weight in 8 bits, with a scale per output."""

    FORM = "int8"
    BITS = 8

    def __init__(self, weight: Tensor) -> None:
        blocks = []
        for rows in torch.split(weight.detach(), ROWS_AT_ONCE):
            codes, scales = int8_codes(_padded(rows))
            headers = scales.view(-1, 1, BLOCK)
            blocks.append(_blocks(headers, codes.int() & 255, self.BITS))
        super().__init__(torch.cat(blocks), weight.shape, weight.shape[1])

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Tell whether a weight of this shape can be packed."""
        return weight.shape[1] % 4 == 0

    def dense(self) -> Tensor:
        headers = BLOCK * torch.bfloat16.itemsize
        scales = self.blocks[:, :, :headers].contiguous().view(torch.bfloat16).view(-1, 1)
        codes = self._codes(headers).to(torch.uint8).view(torch.int8)
        return (codes.bfloat16() * scales)[: self.outputs]


class NativeInt4Matrix(BlockedMatrix):
    """A weight in 4 bits, with a scale and a zero point per output and group of 64 or 32 inputs."""

    FORM = "int4"
    BITS = 4

    def __init__(self, weight: Tensor) -> None:
        group = int4_group(weight.shape[1])
        blocks = []
        for rows in torch.split(weight.detach(), ROWS_AT_ONCE):
            codes, grids = int4_codes(_padded(rows), group)  # grids: [groups, outputs, 2]
            headers = grids.view(len(grids), -1, BLOCK, 2).permute(1, 0, 3, 2)
            blocks.append(_blocks(headers.flatten(2), codes, self.BITS))
        super().__init__(torch.cat(blocks), weight.shape, group)

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Tell whether a weight of this shape can be packed."""
        return weight.shape[1] % 32 == 0

    def dense(self) -> Tensor:
        headers = 2 * BLOCK * torch.bfloat16.itemsize
        grids = self.blocks[:, :, :headers].contiguous().view(torch.bfloat16).view(len(self.blocks), -1, 2, BLOCK)
        scales, middles = grids.transpose(1, 3).flatten(0, 1).unbind(1)  # [padded outputs, groups]
        codes = (self._codes(headers) - 8).bfloat16().view(len(scales), -1, self.group)
        widened = torch.addcmul(middles[..., None], codes, scales[..., None])
        return widened.flatten(1)[: self.outputs]


def _padded(rows: Tensor) -> Tensor:
    """Return ``rows`` and as many of zeros behind them as make whole blocks."""
    return nn.functional.pad(rows, (0, 0, 0, -len(rows) % BLOCK))


def _blocks(headers: Tensor, codes: Tensor, bits: int) -> Tensor:
    """Return blocks as products.cpp reads them, [blocks, groups, bytes].

    ``headers`` [blocks, groups, numbers of the header], ``codes`` [outputs, inputs], unsigned integers.
    """
    blocks, groups, _ = headers.shape
    pairs = 16 // bits
    lanes = codes.view(blocks, BLOCK // LANES, LANES, -1, pairs, 2).permute(0, 3, 1, 2, 5, 4)
    words = sum(lanes[..., pair] << bits * pair for pair in range(pairs)).to(torch.int16)  # type: ignore[union-attr]
    laid = words.reshape(blocks, groups, -1).view(torch.uint8)
    return torch.cat([headers.bfloat16().contiguous().view(torch.uint8), laid], dim=2)
