"""How far the KV that vLLM's model computes in its second layer deviates from that of chunks: what CacheBlend chooses
by (CacheBlend, section 4.3). In the first layer none does, for it looks at each token alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlinker.vllm.adapter import BoundModel, watched
from kvlinker.vllm.protocol.messages import KVDeviation
from kvlinker.vllm.protocol.transfer_plan import COMPARED_LAYER
from kvlinker.vllm.worker.anatomy import LinkedLayer
from kvlinker.vllm.worker.placing import ChunkPart, placed_kv

FIRST_LAYERS = slice(0, COMPARED_LAYER)
"""Those that a pass that compares goes through."""


class Comparison:
    """Of a request's first ``length`` tokens, this worker's heads."""

    def __init__(self, layers: Sequence[LinkedLayer], length: int) -> None:
        self._attention = layers[COMPARED_LAYER].attention
        self._squares = torch.zeros(2, length)

    def note(self, position: int, part: int, new: Tensor, placed: Tensor) -> None:
        """Keys (``part`` 0) or values (1) [tokens, heads, head_dim] from ``position`` on."""
        distances = (new.float() - placed.float()).square_().sum(dim=(1, 2))
        self._squares[part, position : position + len(distances)] = distances.cpu()

    def finish(self, bound: BoundModel) -> KVDeviation:
        """Over all workers' heads, which all of them have to ask for."""
        mean = bound.mean_over_workers(self._squares.to(bound.device)).cpu()
        key, value = (mean * (self._attention.total_heads / self._attention.heads)).numpy()
        return KVDeviation(key, value)


@dataclass(frozen=True, slots=True)
class ComparedRows:
    """Rows of a pass from ``first`` on are the positions from ``begin`` on of a request; ``parts`` of chunks belong
    there."""

    first: int
    begin: int
    parts: Sequence[ChunkPart]
    comparison: Comparison


class _PassIsOver(Exception):  # noqa: N818  # no error
    """Ends a pass by the modules."""


@contextmanager
def comparing(bound: BoundModel, layers: Sequence[LinkedLayer], rows: Sequence[ComparedRows]) -> Iterator[None]:
    """Have a pass by the modules note how its KV deviates, and end as soon as that is known."""
    attention = layers[COMPARED_LAYER].attention

    def attended(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        if name != attention.name:
            return
        new = [part.reshape(-1, attention.heads, attention.head_dim) for part in (key, value)]
        for each in rows:
            for part in each.parts:
                first = each.first + part.begin - each.begin
                own = slice(first, first + part.last - part.first)
                for index, placed in enumerate(placed_kv(layers, COMPARED_LAYER, [part])):
                    each.comparison.note(part.begin, index, new[index][own], placed)
        raise _PassIsOver

    with suppress(_PassIsOver), watched(bound, rotated=lambda *_: None, attended=attended):
        yield
