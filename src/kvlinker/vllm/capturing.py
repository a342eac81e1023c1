"""The KV of chunks while vLLM's model computes it: keys before their rotary embedding, slice by slice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlinker.store import ChunkKV, LayerKV
from kvlinker.vllm.adapter import BoundModel, watched
from kvlinker.vllm.anatomy import LinkedLayer
from kvlinker.vllm.order import CapturedChunk


class Capture:
    """One chunk at positions [begin, end) of a request, this worker's heads of it."""

    def __init__(self, chunk: CapturedChunk, layers: Sequence[LinkedLayer], dtype: torch.dtype) -> None:
        self.chunk = chunk
        tokens = chunk.end - chunk.begin
        shapes = [(layer.attention.heads, tokens, layer.attention.head_dim) for layer in layers]
        self._kv = [(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)) for shape in shapes]

    def note(self, layer: int, begin: int, key: Tensor, value: Tensor) -> None:
        """Keys and values [tokens, heads, head_dim] of the positions from ``begin`` on."""
        first = max(begin, self.chunk.begin)
        last = min(begin + len(key), self.chunk.end)
        if first < last:
            for kept, new in zip(self._kv[layer], (key, value), strict=True):
                own = new[first - begin : last - begin].transpose(0, 1)
                kept[:, first - self.chunk.begin : last - self.chunk.begin].copy_(own)

    def finish(self, bound: BoundModel) -> ChunkKV:
        """The chunk with all workers' heads, which all of them have to ask for."""
        return ChunkKV(
            tuple(LayerKV(*(bound.gather_heads(part.to(bound.device)).cpu() for part in layer)) for layer in self._kv)
        )


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """Rows [first, first + count) of a pass are the positions from ``begin`` on of a request with these captures."""

    first: int
    count: int
    begin: int
    captures: Sequence[Capture]


@contextmanager
def capturing(bound: BoundModel, layers: Sequence[LinkedLayer], rows: Sequence[CapturedRows]) -> Iterator[None]:
    """Have a pass by the modules note its KV."""
    index_of = {layer.attention.name: index for index, layer in enumerate(layers)}
    unrotated: list[Tensor] = []

    def rotated(_: object, __: Tensor, key: Tensor) -> None:
        unrotated.append(key.clone())  # the embedding may be written in place

    def attended(name: str, key: Tensor, value: Tensor) -> None:
        index = index_of[name]
        attention = layers[index].attention
        shape = (-1, attention.heads, attention.head_dim)
        keys, values = (unrotated.pop() if unrotated else key).reshape(shape), value.reshape(shape)
        for part in rows:
            own = slice(part.first, part.first + part.count)
            for capture in part.captures:
                capture.note(index, part.begin, keys[own], values[own])

    with watched(bound, rotated=rotated, attended=attended):
        yield
