"""Codecs that store keys and values in fewer bits: eight, or four after a rotation.

The error is bounded per token and head: each has a scale of its own. Numbers that are not finite
are refused, since no scale fits them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from kvlinker.store.format.codecs.base import Layout, Parts, Room, any_room, register
from kvlinker.store.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_BLOCK = 128
"""The most numbers that share a scale; chosen by hand."""

_PIECE_NUMBERS = 16_384
"""The numbers that are encoded at once, so that a processor's cache holds them; chosen by
hand."""


@register
class Int8:
    """Writes eight bits per number, and a half-precision scale per token and head: the largest
    number becomes ±127."""

    name = "int8"
    compresses = False

    def layout(self, dtype: torch.dtype) -> Layout:
        return {"": (torch.int8, 3), "scale": (torch.float16, 2)}

    def encode(self, heads: Tensor) -> Parts:
        wide = heads.float()
        scale = _half(torch.maximum(*_range(wide)) / 127)
        steps = wide.div_(_divisor(scale)) if wide is not heads else wide / _divisor(scale)
        return {"": steps.round_().clamp_(-127, 127).to(torch.int8), "scale": scale.squeeze(-1)}

    def decode(self, parts: Parts, dtype: torch.dtype, room: Room = any_room) -> Tensor:
        steps = parts[""]
        decoded = room(steps.shape, dtype=dtype)
        for stored, scale, out in _pieces(steps, parts["scale"].to(dtype), decoded):
            torch.mul(stored, scale, out=out)
        return decoded


@register
class Int4:
    """Writes four bits per number after a block-Hadamard rotation, and a scale per token and head,
    as SAW-INT4 does.

    The rotation spreads outliers over a block (the largest power of two that divides ``dim``, at
    most 128), so that all numbers of a block need about the same range. The number that is largest
    becomes -8, whatever its sign. Two numbers share a byte, the earlier one in its lower half.
    """

    name = "int4"
    compresses = False

    def layout(self, dtype: torch.dtype) -> Layout:
        return {"": (torch.uint8, 3), "scale": (torch.float16, 2)}

    def encode(self, heads: Tensor) -> Parts:
        if heads.shape[-1] % 2:
            raise ValueError(f"heads of {heads.shape[-1]} numbers cannot be packed in pairs")
        rotated = torch.empty(heads.shape)
        _rotate(heads.float(), rotated)
        high, low = _range(rotated)
        scale = _half(torch.where(high > low, -high, low) / 8)
        steps = (rotated / _divisor(scale)).round().clamp(-8, 7).to(torch.int8) + 8
        packed = steps[..., ::2].to(torch.uint8) | (steps[..., 1::2].to(torch.uint8) << 4)
        return {"": packed.contiguous(), "scale": scale.squeeze(-1)}

    def decode(self, parts: Parts, dtype: torch.dtype, room: Room = any_room) -> Tensor:
        packed = parts[""]
        decoded = room((*packed.shape[:2], 2 * packed.shape[2]), dtype=dtype)
        for stored, scale, out in _pieces(packed, parts["scale"].to(dtype), decoded):
            steps = _pairs(dtype).index_select(0, stored.flatten().int()).view(out.shape)
            _rotate(steps.mul_(scale), out)
        return decoded


def _half(scale: Tensor) -> Tensor:
    """Round the scale to half precision. Raises ValueError if it has none."""
    half = scale.half()
    if not torch.isfinite(half).all():
        raise ValueError("numbers that are too large, or not finite, have no half-precision scale")
    return half


def _range(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest number, and the negated smallest one, of each token and head: [heads,
    tokens, 1] each, not finite where one of the numbers is not."""
    return heads.amax(-1, keepdim=True), heads.amin(-1, keepdim=True).neg_()


def _divisor(scale: Tensor) -> Tensor:
    """Return ``scale`` as it will be read back, with 1 in place of 0, where all numbers are 0."""
    wide = scale.float()
    return wide.masked_fill(wide == 0, 1)


def _pieces(
    stored: Tensor, scale: Tensor, decoded: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield ``stored`` and ``decoded`` [heads, tokens, …] with ``scale`` [heads, tokens], a piece
    of the rows at a time. A piece fits in the processor's cache, and is too small for PyTorch to
    split it among threads, which would not help threads that read."""
    rows = max(1, _PIECE_NUMBERS // decoded.shape[-1])
    flat = stored.flatten(0, 1), scale.flatten()[:, None], decoded.view(-1, decoded.shape[-1])
    for begin in range(0, len(flat[1]), rows):
        yield (
            flat[0][begin : begin + rows],
            flat[1][begin : begin + rows],
            flat[2][begin : begin + rows],
        )


def _rotate(heads: Tensor, out: Tensor) -> None:
    """Multiply each block of the last dimension by a Hadamard matrix, which is its own inverse."""
    dim = heads.shape[-1]
    block = min(dim & -dim, _LARGEST_BLOCK)
    torch.mm(heads.reshape(-1, block), _hadamard(block).to(heads.dtype), out=out.view(-1, block))


@cache
def _pairs(dtype: torch.dtype) -> Tensor:
    """Return the two numbers, before scaling, that each byte encodes: [256, 2]."""
    bytes_ = torch.arange(256)
    return torch.stack(((bytes_ & 15) - 8, (bytes_ >> 4) - 8), dim=-1).to(dtype)


@cache
def _hadamard(size: int) -> Tensor:
    """Return the orthonormal Hadamard matrix of a power of two (Sylvester's construction)."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return torch.mul(matrix, size**-0.5)
