"""Copies chunks to pinned memory, which devices read without anybody waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvlinker.store import ChunkKV, LayerKV

ALIGNMENT = 256
"""Bytes to a multiple of which tensors begin, so that devices read whole lines."""


def pinned_bytes(size: int) -> Tensor:
    """Return so many bytes of pinned memory."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def pinned(kv: ChunkKV, allocate: Callable[[int], Tensor] = pinned_bytes) -> ChunkKV:
    """Return a copy of the chunk's KV in pinned memory.

    PyTorch rounds what it pins up to a power of two, and would do so for each key and value of each
    layer. So these share a few blocks whose sizes are powers of two already.
    """
    tensors = [tensor for layer in kv.layers for tensor in (layer.key, layer.value)]
    copies: list[Tensor] = []
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    for block, count in _blocks(sizes):
        memory = allocate(block)
        begin = 0
        for tensor in tensors[len(copies) : len(copies) + count]:
            copy = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            begin += sizes[len(copies)]
            copies.append(copy.copy_(tensor))
    pairs = zip(copies[::2], copies[1::2], strict=True)
    return replace(kv, layers=tuple(LayerKV(key, value) for key, value in pairs))


def _blocks(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield blocks that hold things of these sizes in order, and how many each holds: the largest
    power of two that is filled by what is left, as long as one fits into it."""
    first = 0
    while first < len(sizes):
        rest = sum(sizes[first:])
        block = max(1 << (rest.bit_length() - 1), 1 << (sizes[first] - 1).bit_length())
        last, filled = first, 0
        while last < len(sizes) and filled + sizes[last] <= block:
            filled += sizes[last]
            last += 1
        yield block, last - first
        first = last
