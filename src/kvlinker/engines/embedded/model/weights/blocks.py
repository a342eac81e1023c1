"""The blocks in which ``native/products.cpp`` reads weights; its comment at the top describes them.

``BLOCK`` and ``LANES`` are constants there, too. Products are compared with PyTorch's before they
are used, so that native code for blocks of another kind is found out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvlinker.engines.contract.grouped_codes import BLOCK

LANES = 16
"""The outputs whose weights a vector holds."""


def padded(rows: Tensor) -> Tensor:
    """Return ``rows`` [outputs, inputs] and as many of zeros after them as make whole blocks."""
    return nn.functional.pad(rows, (0, 0, 0, -len(rows) % BLOCK))


def bf16_blocks(weight: Tensor) -> Tensor:
    """Return a weight [outputs, inputs] with an even number of inputs, of 16 bits, in blocks:
    [blocks, 64 · inputs]."""
    rows = padded(weight)
    return rows.view(-1, BLOCK, rows.shape[1] // 2, 2).transpose(1, 2).flatten(1)


def code_blocks(headers: Tensor, codes: Tensor, bits: int) -> Tensor:
    """Return codes of 8 or 4 ``bits`` in blocks: [blocks, groups, bytes of a group], uint8.

    ``headers`` [blocks, groups, numbers of the header], ``codes`` [64 · blocks, inputs], unsigned
    integers.
    """
    blocks, groups, _ = headers.shape
    pairs = 16 // bits
    lanes = codes.view(blocks, BLOCK // LANES, LANES, -1, pairs, 2).permute(0, 3, 1, 2, 5, 4)
    words = sum(lanes[..., pair] << bits * pair for pair in range(pairs)).to(torch.int16)  # type: ignore[union-attr]
    laid = words.reshape(blocks, groups, -1).view(torch.uint8)
    return torch.cat([headers.bfloat16().contiguous().view(torch.uint8), laid], dim=2)


def codes_of(blocks: Tensor, bits: int, *, header_bytes: int) -> Tensor:
    """Return the codes that ``code_blocks`` put into blocks with headers of ``header_bytes`` bytes:
    [64 · blocks, inputs], int32, unsigned."""
    words = blocks[:, :, header_bytes:].contiguous().view(torch.int16).int()
    pairs = 16 // bits
    apart = torch.stack([words >> bits * pair & 2**bits - 1 for pair in range(pairs)], dim=-1)
    lanes = apart.view(
        len(words), -1, BLOCK // LANES, LANES, 2, pairs
    )  # blocks, steps, vectors, outputs, inputs
    return lanes.permute(0, 2, 3, 1, 5, 4).flatten(3).flatten(0, 2)
