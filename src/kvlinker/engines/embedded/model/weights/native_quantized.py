"""Weights in 8 and 4 bits in the blocks of ``native/products.cpp``, and those of GGUF files in the
blocks of ``native/grouped_products.cpp``: faster than PyTorch's kernels for any rows.

By codes, inputs are multiplied that are rounded to 8 bits, each group of them by a scale of its
own. By codes of 8 bits, inputs keep 16 where one of them is so much larger than the others of its
group that rounding these would do harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from kvlinker.engines.contract.grouped_codes import BLOCK, GroupedForm, Placed
from kvlinker.engines.embedded.model.weights.blocks import code_blocks, codes_of, padded
from kvlinker.engines.embedded.model.weights.matrices import ROWS_AT_ONCE, Matrix, NativeWeights
from kvlinker.engines.embedded.model.weights.native_products import (
    Form,
    grouped_products,
    products_of,
    rounded_to_bytes,
)
from kvlinker.engines.embedded.model.weights.quantized import (
    finished,
    int4_codes,
    int4_group,
    int8_codes,
)


class CodesMatrix(Matrix):
    """Holds a weight whose codes lie in blocks of 64 outputs; each block has groups of inputs, each
    with a header."""

    AMX_FROM = 32
    """The number of rows from which on, where there is AMX, oneDNN by the whole matrix in bf16 is
    faster."""

    def __init__(self, form: Form, blocks: Tensor, shape: torch.Size, group: int) -> None:
        """``blocks`` [blocks, groups, bytes of a group] hold a weight of this shape, [outputs,
        inputs], by which native code multiplies as ``form`` says."""
        super().__init__()
        self.form = form
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
            output = self.product(self.form, rows)
        return finished(output, inputs, bias)

    def native(self) -> NativeWeights | None:
        if self._dense_from is not None:
            return None
        address = self.blocks.data_ptr()
        return NativeWeights(self.form, address, self.outputs, self.inputs, self.group, True)

    def product(self, form: Form, rows: Tensor) -> Tensor:
        """Return ``rows`` [rows, inputs], bf16, times the weight transposed: [rows, outputs]."""
        return products_of(form).multiply(
            form, rows, self.blocks.data_ptr(), self.outputs, group=self.group, bias=None
        )


class NativeInt8Matrix(CodesMatrix):
    """Holds a weight in 8 bits, with a scale per output."""

    BITS: ClassVar[int] = 8
    """The bits of a code."""

    LARGEST_ERROR = 0.03
    """The most by which rounding inputs to 8 bits may move outputs, relative to their distance for
    different tokens; weights in 8 bits move them by 0.01."""

    GROUP = 256
    """The neighbouring inputs of a row that are rounded to 8 bits by one scale."""

    def __init__(self, weight: Tensor, sampled: Tensor | None = None) -> None:
        """``sampled`` [rows, inputs], bf16, are inputs that the layer gets: by them it is decided
        whether inputs may be rounded to 8 bits. Without them, they keep 16."""
        blocks = []
        for rows in torch.split(weight.detach(), ROWS_AT_ONCE):
            codes, scales = int8_codes(padded(rows))
            headers = scales.view(-1, 1, BLOCK)
            blocks.append(code_blocks(headers, codes.int() + 128, self.BITS))
        super().__init__("int8", torch.cat(blocks), weight.shape, weight.shape[1])
        self.rounding_error = float("inf") if sampled is None else self._rounding_error(sampled)
        if self.rounding_error <= self.LARGEST_ERROR:
            self.round_inputs()

    def round_inputs(self) -> None:
        """From now on, multiply inputs that are rounded to 8 bits."""
        self.form, self.group = "int8_int8", self.GROUP

    def _rounding_error(self, sampled: Tensor) -> float:
        """Return how far rounding inputs to 8 bits moves outputs, relative to their distance from
        the output for a token in the middle, or as far as half of the tokens' are: the root mean
        square over tokens.

        The part that all tokens have in common, such as channels that are always large, does not
        distinguish them, and would hide the effect of rounding on the rest; so would a token that
        is far larger than others.
        """
        rounding = rounded_to_bytes(sampled, self.GROUP) - sampled.float()
        apart = sampled.float() - sampled.float().median(dim=0).values
        moved, distance = (
            self.product("int8", part.bfloat16()).float().norm(dim=1) for part in (rounding, apart)
        )
        errors = moved / distance.clamp_min(float(distance.median()))
        return float(errors.nan_to_num(0.0).square().mean().sqrt())

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Return whether a weight of this shape can be packed."""
        return weight.shape[1] % 4 == 0

    def dense(self) -> Tensor:
        headers = BLOCK * torch.bfloat16.itemsize
        scales = self.blocks[:, :, :headers].contiguous().view(torch.bfloat16).view(-1, 1)
        codes = codes_of(self.blocks, self.BITS, header_bytes=headers) - 128
        return (codes.bfloat16() * scales)[: self.outputs]


class NativeInt4Matrix(CodesMatrix):
    """Holds a weight in 4 bits, with a scale and a zero point per output and group of 64 or 32
    inputs."""

    BITS: ClassVar[int] = 4
    """The bits of a code."""

    def __init__(self, weight: Tensor) -> None:
        group = int4_group(weight.shape[1])
        blocks = []
        for rows in torch.split(weight.detach(), ROWS_AT_ONCE):
            codes, grids = int4_codes(padded(rows), group)  # grids: [groups, outputs, 2]
            headers = grids.view(len(grids), -1, BLOCK, 2).permute(1, 0, 3, 2)
            blocks.append(code_blocks(headers.flatten(2), codes, self.BITS))
        super().__init__("int4", torch.cat(blocks), weight.shape, group)

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Return whether a weight of this shape can be packed."""
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


class GroupedMatrix(CodesMatrix):
    """Holds weights of a GGUF file as the codes that they are there: of one layer, or of several
    with one input, which lie in the file one after another."""

    form: GroupedForm

    def __init__(self, content: Tensor, places: Sequence[Placed]) -> None:
        """``content`` is the whole file, in which ``places`` are neighbours."""
        first, last = places[0], places[-1]
        outputs, width = sum(place.shape[0] for place in places), first.shape[1]
        groups = width // first.group
        blocks = content[first.begin : last.end].view(-(-outputs // BLOCK), groups, -1)
        super().__init__(first.form, blocks, torch.Size((outputs, width)), first.group)

    def rows(self, chosen: Tensor) -> Tensor:
        """Return the ``chosen`` rows [rows] of the weight: [rows, inputs], bf16."""
        products = grouped_products()
        assert products is not None, "weights were read for a processor with native code"
        address = self.blocks.data_ptr()
        return products.rows(self.form, chosen, address, width=self.inputs, group=self.group)

    def dense(self) -> Tensor:
        return self.rows(torch.arange(self.outputs))


def multiplied_in_int8(model: nn.Module) -> str:
    """Say by how many of its matrices of weights in 8 bits native code multiplies inputs in 8 bits,
    and the largest error that rounding these makes."""
    matrices = [each for each in model.modules() if isinstance(each, NativeInt8Matrix)]
    if not matrices:
        return "No matrix in 8 bits is multiplied by native code"
    errors = [each.rounding_error for each in matrices if each.form == "int8_int8"]
    others = len(matrices) - len(errors)
    most = f", which moves outputs by up to {max(errors):.1%}" if errors else ""
    rest = f"; the other {others} by inputs in 16" if others else ""
    return (
        f"{len(errors)} of {len(matrices)} matrices in 8 bits are multiplied by inputs in 8"
        f" bits{most}{rest}"
    )
