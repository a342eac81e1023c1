"""How a tier writes keys and values: as they are, or in fewer bits, and these compressed or not.

A codec turns one layer's keys or values [heads, tokens, dim] into named parts and back. What is lost is bounded per
token and head: each has a scale of its own. Numbers that are not finite make the codec refuse: no scale fits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from kvlinker.errors import InvalidRequestError
from kvlinker.store.compression import MissingLibraryError, require_zstd
from kvlinker.store.errors import StoreError

Parts = Mapping[str, Tensor]
"""Tensors by name, in order; "" is the main one, whose first two dimensions are [heads, tokens]."""

Layout = Mapping[str, tuple[torch.dtype, int]]
"""Dtype and number of dimensions of each part."""

_LARGEST_BLOCK = 128


class Codec(Protocol):
    """One way to write heads [heads, tokens, dim] of a floating dtype."""

    @property
    def name(self) -> str:
        """As in settings and stored files."""
        ...

    @property
    def compresses(self) -> bool:
        """Whether the parts are stored compressed (``kvlinker.store.compression``)."""
        ...

    def layout(self, dtype: torch.dtype) -> Layout:
        """The parts of heads of this dtype."""
        ...

    def encode(self, heads: Tensor) -> Parts:
        """Contiguous CPU tensors. Raises ValueError for numbers that no scale fits, where the codec needs one."""
        ...

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """[heads, tokens, dim]. ``parts`` are those of one ``encode``."""
        ...


class Raw:
    """The numbers themselves."""

    name = "raw"
    compresses = False

    def layout(self, dtype: torch.dtype) -> Layout:
        return {"": (dtype, 3)}

    def encode(self, heads: Tensor) -> Parts:
        return {"": heads.contiguous()}

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        return parts[""].to(dtype)


class Int8:
    """Eight bits per number, and a half-precision scale per token and head: the largest number becomes ±127."""

    name = "int8"
    compresses = False

    def layout(self, dtype: torch.dtype) -> Layout:
        return {"": (torch.int8, 3), "scale": (torch.float16, 2)}

    def encode(self, heads: Tensor) -> Parts:
        wide = _finite(heads)
        scale = _half(wide.abs().amax(-1, keepdim=True) / 127)
        return {"": (wide / _divisor(scale)).round().clamp(-127, 127).to(torch.int8), "scale": scale.squeeze(-1)}

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        return parts[""].to(dtype) * parts["scale"].to(dtype)[..., None]


class Int4:
    """Four bits per number behind a block-Hadamard rotation, as SAW-INT4 describes, and a scale per token and head.

    The rotation spreads outliers over a block (the largest power of two that divides ``dim``, at most 128), so that all
    numbers of a block need about the same range. The number that is largest becomes -8, whatever its sign. Two numbers
    share a byte, the earlier one in its lower half.
    """

    name = "int4"
    compresses = False

    def layout(self, dtype: torch.dtype) -> Layout:
        return {"": (torch.uint8, 3), "scale": (torch.float16, 2)}

    def encode(self, heads: Tensor) -> Parts:
        rotated = _rotated(_finite(heads))
        largest = rotated.gather(-1, rotated.abs().argmax(-1, keepdim=True))
        scale = _half(largest / -8)
        steps = (rotated / _divisor(scale)).round().clamp(-8, 7).to(torch.int8) + 8
        packed = steps[..., ::2].to(torch.uint8) | (steps[..., 1::2].to(torch.uint8) << 4)
        return {"": packed.contiguous(), "scale": scale.squeeze(-1)}

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        packed = parts[""]
        steps = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int8) - 8
        return _rotated(steps.to(dtype) * parts["scale"].to(dtype)[..., None])


class Compressed:
    """Another codec's parts, compressed."""

    compresses = True

    def __init__(self, codec: Codec) -> None:
        self.name = f"{codec.name}+zstd"
        self.layout = codec.layout
        self.encode = codec.encode
        self.decode = codec.decode


RAW: Codec = Raw()
COMPRESSED_RAW: Codec = Compressed(RAW)

CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (RAW, Int8(), Int4(), COMPRESSED_RAW, Compressed(Int8()), Compressed(Int4()))
}
"""All codecs by name."""


def find_codec(name: str) -> Codec:
    """Raises InvalidRequestError, which lists the names, for an unknown one, and StoreError where its library is
    missing."""
    if name not in CODECS:
        raise InvalidRequestError(f"Unknown codec {name!r}; known are {', '.join(CODECS)}.", param="codec")
    codec = CODECS[name]
    if codec.compresses:
        try:
            require_zstd()
        except MissingLibraryError as error:
            raise StoreError(f"The codec {name} cannot be used: {error}") from error
    return codec


def _half(scale: Tensor) -> Tensor:
    half = scale.half()
    if not torch.isfinite(half).all():
        raise ValueError("numbers that are too large have no half-precision scale")
    return half


def _finite(heads: Tensor) -> Tensor:
    wide = heads.float()
    if heads.shape[-1] % 2:
        raise ValueError(f"heads of {heads.shape[-1]} numbers cannot be packed in pairs")
    if not torch.isfinite(wide).all():
        raise ValueError("numbers that are not finite have no scale")
    return wide


def _divisor(scale: Tensor) -> Tensor:
    """``scale`` as it will be read, 1 where it is zero: then all numbers are."""
    wide = scale.float()
    return wide.masked_fill(wide == 0, 1)


def _rotated(heads: Tensor) -> Tensor:
    """Each block of the last dimension times a Hadamard matrix, which is its own inverse."""
    dim = heads.shape[-1]
    block = min(dim & -dim, _LARGEST_BLOCK)
    blocks = heads.reshape(*heads.shape[:-1], dim // block, block)
    return (blocks @ _hadamard(block).to(heads.dtype)).reshape(heads.shape)


@cache
def _hadamard(size: int) -> Tensor:
    """The orthonormal Hadamard matrix of a power of two (Sylvester's construction)."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return torch.mul(matrix, size**-0.5)
