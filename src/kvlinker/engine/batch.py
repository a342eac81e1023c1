"""What one step computes: runs of many requests, and the chunks that are placed before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engine.anatomy import LayerShape
from kvlinker.store.chunk_kv import ChunkKV, LayerKV


@dataclass(frozen=True, slots=True)
class Placed:
    """Tokens [first, last) of a chunk's KV, to be written to the slots from ``slot`` on with the rotary embedding
    of the positions from ``rotary_start`` on (both meant for token ``first``)."""

    kv: ChunkKV
    first: int
    last: int
    slot: int
    rotary_start: int


class Capture:
    """Collects a chunk's KV while it is computed: keys without rotary embedding."""

    def __init__(self, layers: Sequence[LayerShape], *, first: int, tokens: int, dtype: torch.dtype) -> None:
        """The chunk's ``tokens`` stand at the positions from ``first`` on."""
        self._first = first
        self._tokens = tokens
        self._layers = tuple(
            LayerKV(
                key=torch.empty(layer.kv_heads, tokens, layer.key_dim, dtype=dtype),
                value=torch.empty(layer.kv_heads, tokens, layer.value_dim, dtype=dtype),
            )
            for layer in layers
        )

    def record(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Take one run's un-rotated ``key`` and ``value`` [kv_heads, run, head_dim] from position ``start`` on."""
        begin = max(start, self._first)
        end = min(start + key.shape[1], self._first + self._tokens)
        if begin < end:
            rows, columns = slice(begin - start, end - start), slice(begin - self._first, end - self._first)
            self._layers[layer].key[:, columns] = key[:, rows]
            self._layers[layer].value[:, columns] = value[:, rows]

    def finish(self) -> ChunkKV:
        return ChunkKV(self._layers)


@dataclass(frozen=True, slots=True)
class Run:
    """Positions [start, start + len(tokens)) of one request, to be computed now.

    ``slot``: where the request's position 0 lies. ``wants_logits``: the last token's logits are needed.
    """

    slot: int
    start: int
    tokens: NDArray[np.int64]
    wants_logits: bool = False
    capture: Capture | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Within a request, runs are disjoint and ascending; placements come before all runs."""

    runs: tuple[Run, ...]
    placed: tuple[Placed, ...] = field(default=())

    @property
    def tokens(self) -> int:
        return sum(len(run.tokens) for run in self.runs)
