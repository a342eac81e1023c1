"""Chunk KV on its way from the store into vLLM's KV cache: the keys rotated straight into position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlinker.store import ChunkKV
from kvlinker.vllm.anatomy import LinkedLayer


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Tokens [first, last) of a chunk for ``slots``, rotated to ``positions``; both [last - first]."""

    kv: ChunkKV
    first: int
    last: int
    positions: Tensor
    slots: Tensor


def place(layers: Sequence[LinkedLayer], parts: Sequence[ChunkPart]) -> None:
    """Write all parts into the KV cache, layer by layer."""
    if not parts:
        return
    positions = torch.cat([part.positions for part in parts])
    slots = torch.cat([part.slots for part in parts])
    for index, layer in enumerate(layers):
        key = _gathered(layer, [part.kv.layers[index].key[:, part.first : part.last] for part in parts], slots)
        value = _gathered(layer, [part.kv.layers[index].value[:, part.first : part.last] for part in parts], slots)
        layer.place(key, value, positions, slots)


def _gathered(layer: LinkedLayer, heads: Sequence[Tensor], slots: Tensor) -> Tensor:
    """This worker's heads of all parts [kv_heads, tokens, head_dim], as [all tokens, heads, head_dim] on its device."""
    attention = layer.attention
    own = slice(attention.first_head, attention.first_head + attention.heads)
    gathered = torch.empty((len(slots), attention.heads, attention.head_dim), dtype=heads[0].dtype, device=slots.device)
    begin = 0
    for part in heads:
        end = begin + part.shape[1]
        gathered[begin:end].copy_(part[own].transpose(0, 1))
        begin = end
    return gathered
