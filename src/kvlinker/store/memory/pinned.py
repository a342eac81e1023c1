"""Pinned memory of the host, from which devices copy asynchronously."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvlinker.store.chunk_kv import ChunkKV, LayerKV
from kvlinker.store.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

ALIGNMENT = 256
"""Bytes to a multiple of which tensors begin, so that devices read whole lines; chosen by hand."""


def pinned_bytes(size: int) -> Tensor:
    """Return ``size`` bytes of pinned memory. Raises RuntimeError if there are fewer."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class PinnedChunk:
    """The pinned memory of one chunk, whose layers come one after another.

    PyTorch rounds what it pins up to a power of two, and would do so for each key and value of each
    layer. So these share a few blocks whose sizes are powers of two already: the largest that what
    is still to come fills, as long as one layer fits into it. Where no more memory can be pinned,
    layers are left where they are.
    """

    def __init__(self, layers: int, allocate: Callable[[int], Tensor] = pinned_bytes) -> None:
        """``layers`` is the number of layers that come, all about as large."""
        self._left = layers
        self._allocate = allocate
        self._block: Tensor | None = None
        self._used = 0

    def take(self, layer: LayerKV) -> LayerKV:
        """Return a copy of the layer in pinned memory; itself where there is none."""
        self._left -= 1
        rest = sum(map(_align, layer.pieces)) * (1 + max(0, self._left))

        def copied(part: Tensor) -> Tensor:
            nonlocal rest
            room = self._room(_align(part), rest)
            rest -= _align(part)
            return room[: part.nbytes].view(part.dtype).view(part.shape).copy_(part)

        try:
            return layer.moved(copied)
        except RuntimeError as error:
            logger.warning("A chunk's KV stays in memory that is not pinned: %s", error)
            return layer

    def _room(self, size: int, rest: int) -> Tensor:
        """Return ``size`` bytes, of the ``rest`` that is still to be allocated."""
        if self._block is None or self._used + size > len(self._block):
            block = max(1 << (rest.bit_length() - 1), 1 << (size - 1).bit_length())
            self._block, self._used = self._allocate(block), 0
        begin, self._used = self._used, self._used + size
        return self._block[begin : self._used]


def _align(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes up to where the next one begins."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def pinned(kv: ChunkKV, allocate: Callable[[int], Tensor] = pinned_bytes) -> ChunkKV:
    """Return a copy of the chunk's KV in pinned memory."""
    memory = PinnedChunk(len(kv.layers), allocate)
    return replace(kv, layers=tuple(map(memory.take, kv.layers)))
