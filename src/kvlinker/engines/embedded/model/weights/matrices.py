"""Weights of linear layers, in the order in which a processor reads them fastest."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvlinker.engines.contract.grouped_codes import BLOCK
from kvlinker.engines.embedded.model.weights.blocks import bf16_blocks
from kvlinker.engines.embedded.model.weights.native_products import Form, native_products
from kvlinker.engines.native.targets import this_target

PADDED_ROWS = 4
"""The rows that one row is computed as, in fp32 with AVX-512: oneDNN reads the weights faster than
for one."""


ROWS_AT_ONCE = 1024
"""The rows of a weight that are put in blocks at a time: whole blocks."""


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """Says how native code multiplies by a matrix."""

    form: Form

    address: int
    """Where they lie, as long as there is the matrix."""

    outputs: int
    width: int
    group: int
    rounds_before_bias: bool
    """True if products are rounded before the bias is added."""

    most_rows: int | None = None
    """The most rows that are multiplied so; None: any number."""


class Matrix(nn.Module):
    """Holds a linear layer's weight [outputs, inputs], ready to be multiplied by; there are no
    gradients."""

    @abstractmethod
    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``inputs`` [..., inputs] times the weight transposed, plus ``bias`` [outputs]:
        [..., outputs]."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return a plain copy of the weight, [outputs, inputs]."""

    def native(self) -> NativeWeights | None:
        """Return how native code does what ``multiply`` does; None if something else does it."""
        return None

    def in_blocks(self) -> Tensor | None:
        """Return the weight itself where it lies in blocks of bf16: [blocks, inputs / 2, BLOCK,
        2]."""
        return None

    def _save_to_state_dict(self, *args: object) -> None:
        """Write nothing: the linear layers that use the matrix write it as their weights."""


class PackedMatrix(Matrix):
    """Holds a weight in oneDNN's order.

    oneDNN multiplies many rows by it; in bf16, what comes out is bit-identical to a plain weight's.
    Few rows are multiplied by native code, which reads the same weights up to twice as fast and
    rounds a few last bits otherwise.
    """

    NATIVE_UP_TO = 512
    """The most rows for which native code is as fast as oneDNN without AMX; with AMX, oneDNN
    multiplies all."""

    def __init__(self, weight: Tensor, *, native: bool = True) -> None:
        """Pack a plain ``weight`` [outputs, inputs]. Without ``native``, oneDNN multiplies few
        rows, too."""
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self._pads = (
            weight.dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() == "AVX512"
        )
        self._native_up_to = 0
        fits = native and weight.dtype == torch.bfloat16 and not torch.cpu._is_amx_tile_supported()
        self.unreadable = False
        """True if native code were to multiply few rows, but oneDNN has other blocks than that."""

        if fits and native_products() is not None:
            shape = tuple(weight.shape)
            if shape not in _READABLE:
                _READABLE[shape] = _in_blocks(packed, weight)
            self.unreadable = not _READABLE[shape]
            self._native_up_to = 0 if self.unreadable else self.NATIVE_UP_TO

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        outputs, width = self.packed.shape
        few = self._native_up_to > 0 and inputs.numel() <= self._native_up_to * width
        if few and (products := native_products()) is not None:
            address = torch.ops.mkldnn.data_ptr(self.packed)
            return products.multiply("bf16", inputs, address, outputs, group=width, bias=bias)
        if self._pads and inputs.numel() == inputs.shape[-1]:
            padded = inputs.reshape(1, -1).expand(PADDED_ROWS, -1).contiguous()
            return _linear(padded, self.packed, bias)[0].view(*inputs.shape[:-1], -1)
        return _linear(inputs, self.packed, bias)

    def dense(self) -> Tensor:
        return self.packed.to_dense()

    def native(self) -> NativeWeights | None:
        if not self._native_up_to:
            return None
        outputs, width = self.packed.shape
        address = torch.ops.mkldnn.data_ptr(self.packed)
        return NativeWeights("bf16", address, outputs, width, width, False, self._native_up_to)

    def in_blocks(self) -> Tensor | None:
        if not self._native_up_to:
            return None
        numbers = _numbers_of(self.packed).view(torch.bfloat16)
        return numbers.view(len(numbers), -1, BLOCK, 2)


class BlockedMatrix(Matrix):
    """Holds a weight in bf16 in native code's own blocks, by which it multiplies any number of
    rows: for CPUs whose bf16 oneDNN does not multiply fast."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.outputs, self.inputs = weight.shape
        parts = torch.split(weight.detach(), ROWS_AT_ONCE)
        blocks = weight.new_empty(-(-self.outputs // BLOCK), BLOCK * self.inputs)
        for part, into in zip(parts, torch.split(blocks, ROWS_AT_ONCE // BLOCK), strict=True):
            into.copy_(bf16_blocks(part))
        self.blocks = nn.Parameter(blocks, requires_grad=False)

    @staticmethod
    def takes(weight: Tensor, *, native: bool = True) -> bool:
        """Return whether native code multiplies by a weight of this precision and shape here, and
        faster than oneDNN."""
        if not (native and weight.dtype == torch.bfloat16 and weight.is_cpu):
            return False
        target = this_target()
        slow_elsewhere = target is not None and not torch.cpu._is_avx512_bf16_supported()
        return slow_elsewhere and weight.shape[1] % 2 == 0 and native_products() is not None

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        products = native_products()
        assert products is not None, "weights were packed for a processor with native code"
        address = self.blocks.data_ptr()
        return products.multiply(
            "bf16", inputs, address, self.outputs, group=self.inputs, bias=bias
        )

    def dense(self) -> Tensor:
        blocks = self.blocks.view(-1, self.inputs // 2, BLOCK, 2)
        return blocks.transpose(1, 2).reshape(-1, self.inputs)[: self.outputs]

    def native(self) -> NativeWeights:
        width = self.inputs
        return NativeWeights("bf16", self.blocks.data_ptr(), self.outputs, width, width, False)

    def in_blocks(self) -> Tensor:
        return self.blocks.detach().view(-1, self.inputs // 2, BLOCK, 2)


def packed_matrix(weight: Tensor, *, native: bool = True) -> Matrix:
    """Return a plain ``weight`` [outputs, inputs] in oneDNN's order, or in native code's where that
    does not read oneDNN's, which is another one for small weights."""
    matrix = PackedMatrix(weight, native=native)
    return BlockedMatrix(weight) if matrix.unreadable and weight.shape[1] % 2 == 0 else matrix


def _linear(inputs: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise.default(
        inputs, packed, bias, "none", [], ""
    )
    return output


_READABLE: dict[tuple[int, ...], bool] = {}
"""Whether oneDNN packs weights of a shape, bf16, in the blocks that native code reads: it packs all
of a shape alike."""


def _in_blocks(packed: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN packed a weight [outputs, inputs], bf16, in the blocks that native code
    reads."""
    outputs, inputs = weight.shape
    blocks = -(-outputs // BLOCK)
    size = blocks * BLOCK * inputs
    if (
        inputs % 2
        or not hasattr(torch.ops.mkldnn, "data_ptr")
        or torch.ops.mkldnn._nbytes(packed) != 2 * size
    ):
        return False
    found = _numbers_of(packed)
    first, last = weight[:BLOCK], weight[(blocks - 1) * BLOCK :]
    return all(
        torch.equal(found[index], bf16_blocks(rows.detach()).view(torch.int16)[0])
        for index, rows in ((0, first), (-1, last))
    )


def _numbers_of(packed: Tensor) -> Tensor:
    """Return the numbers of a weight that oneDNN packed in blocks, as they lie: [blocks, BLOCK ·
    inputs], of 16 bits. They are there as long as ``packed`` is."""
    outputs, inputs = packed.shape
    blocks = -(-outputs // BLOCK)
    size, address = blocks * BLOCK * inputs, torch.ops.mkldnn.data_ptr(packed)
    memory = (ctypes.c_uint16 * size).from_address(address)
    return torch.frombuffer(memory, dtype=torch.int16).view(blocks, -1)


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether oneDNN multiplies by packed weights of this dtype here, and faster than by
    plain ones."""
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
