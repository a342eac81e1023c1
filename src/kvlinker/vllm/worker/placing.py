"""Chunk KV on its way from the store into vLLM's KV cache: the keys rotated straight into position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlinker.store import ChunkKV
from kvlinker.vllm.worker.anatomy import LinkedLayer


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Tokens [first, last) of a chunk for the prompt's positions from ``begin`` on, which are ``slots`` of the KV
    cache, rotated to ``positions``; both [last - first]."""

    kv: ChunkKV
    first: int
    last: int
    begin: int
    positions: Tensor
    slots: Tensor


def place(layers: Sequence[LinkedLayer], parts: Sequence[ChunkPart]) -> None:
    """Write all parts into the KV cache, layer by layer."""
    if not parts:
        return
    slots = torch.cat([part.slots for part in parts])
    for index, layer in enumerate(layers):
        key, value = placed_kv(layers, index, parts)
        layer.attention.write(key, value, slots)


def placed_kv(layers: Sequence[LinkedLayer], index: int, parts: Sequence[ChunkPart]) -> tuple[Tensor, Tensor]:
    """The parts' keys, rotated, and values in layer ``index``, this worker's heads: [all tokens, heads, head_dim] on
    its device."""
    layer = layers[index]
    key = _gathered(layer, [part.kv.layers[index].key[:, part.first : part.last] for part in parts], parts)
    value = _gathered(layer, [part.kv.layers[index].value[:, part.first : part.last] for part in parts], parts)
    return layer.rotated(key, torch.cat([part.positions for part in parts])), value


def _gathered(layer: LinkedLayer, heads: Sequence[Tensor], parts: Sequence[ChunkPart]) -> Tensor:
    """Of all parts' [kv_heads, tokens, head_dim] this worker's."""
    attention = layer.attention
    own = slice(attention.first_head, attention.first_head + attention.heads)
    tokens = sum(part.last - part.first for part in parts)
    device = parts[0].slots.device
    gathered = torch.empty((tokens, attention.heads, attention.head_dim), dtype=heads[0].dtype, device=device)
    begin = 0
    for part in heads:
        end = begin + part.shape[1]
        gathered[begin:end].copy_(part[own].transpose(0, 1))
        begin = end
    return gathered
