"""Placing chunks in an engine's KV cache: what kernels that do so take, on GPUs and on CPUs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

KeyValue = tuple[Tensor, Tensor]


class Rounding(NamedTuple):
    """How caches in fp8 round: their form, and each layer's scales of keys and values, fp32, on the
    device, by which what is kept is to be multiplied."""

    dtype: torch.dtype
    scales: Sequence[KeyValue]


class Rotation(NamedTuple):
    """A rotary embedding's tables."""

    cos: Tensor
    """[positions, pairs], any stride between positions."""

    sin: Tensor
    interleaved: bool
    """True if dimension 2i turns with 2i + 1, otherwise i with i + pairs."""


class PlacingKernel(Protocol):
    """Places tokens of chunks in KV caches."""

    @property
    def dtypes(self) -> Collection[torch.dtype]:
        """The dtypes in which it takes keys and values."""
        ...

    @property
    def forms(self) -> Collection[torch.dtype]:
        """The forms of fp8 in which it writes to caches."""
        ...

    def place(
        self,
        sources: Sequence[Sequence[KeyValue]],
        caches: Sequence[KeyValue],
        tokens: Tensor,
        rotation: Rotation | None,
        *,
        rounding: Rounding | None = None,
    ) -> None:
        """Place tokens of a few layers.

        ``sources`` are, for each layer, parts of keys and values [heads, rows, dim], on the device
        or in pinned memory, ``caches`` [layers] of keys and values [blocks, block_size, heads,
        dim], bytes where there is a ``rounding``. ``tokens`` [4, tokens], int64: part, row in it,
        position, slot. Raises LookupError for what it does not place.
        """
        ...
