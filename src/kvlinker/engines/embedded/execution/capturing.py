"""Collects KV, keys without rotary embedding, while a sequence is computed: of chunks that stand in
it, or of the answer that it grows by."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvlinker.engines.contract.observation import ScoreCollector
from kvlinker.engines.embedded.model.anatomy import LayerShape, keeping
from kvlinker.store.chunk_kv import ChunkKV, LayerKV


class Recorder(Protocol):
    """Takes the KV of runs, layer by layer."""

    def record(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Keep one run's un-rotated ``key`` and ``value`` [kv_heads, run, head_dim] from position
        ``start`` on, in this layer of those that keep any."""
        ...


class Capture:
    """Collects the KV of chunks while a sequence that holds them is computed: keys without rotary
    embedding."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        spans: Sequence[tuple[int, int]],
        *,
        dtype: torch.dtype,
        scores: ScoreCollector | None = None,
    ) -> None:
        """``spans`` are the positions [start, end) of the chunks. ``scores`` collects theirs, in
        the same order."""
        self._shapes = keeping(layers)
        self._spans = tuple(spans)
        self._dtype = dtype
        self.scores = scores

    @cached_property
    def _chunks(self) -> tuple[tuple[LayerKV, ...], ...]:
        """The KV per chunk and layer. It is allocated when the sequence's turn comes, not while it
        waits."""
        return tuple(
            tuple(
                LayerKV(
                    key=torch.empty(shape.kv_heads, end - start, shape.key_dim, dtype=self._dtype),
                    value=torch.empty(
                        shape.kv_heads, end - start, shape.value_dim, dtype=self._dtype
                    ),
                )
                for shape in self._shapes
            )
            for start, end in self._spans
        )

    def record(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        for (first, last), chunk in zip(self._spans, self._chunks, strict=True):
            begin, end = max(start, first), min(start + key.shape[1], last)
            if begin < end:
                rows, columns = slice(begin - start, end - start), slice(begin - first, end - first)
                chunk[layer].key[:, columns] = key[:, rows]
                chunk[layer].value[:, columns] = value[:, rows]

    def finish(self) -> tuple[ChunkKV, ...]:
        """Return the KV of every chunk, once all layers have seen all tokens."""
        scores = [None] * len(self._spans) if self.scores is None else self.scores.finish()
        return tuple(
            ChunkKV(layers, found) for layers, found in zip(self._chunks, scores, strict=True)
        )


class _Part(NamedTuple):
    """The KV of neighbouring positions from ``start`` on."""

    start: int
    key: Tensor
    value: Tensor

    @property
    def end(self) -> int:
        return self.start + int(self.key.shape[1])


class AnswerCapture:
    """Collects the KV of generated tokens, as many as there come to be."""

    def __init__(self, layers: int, start: int) -> None:
        """``start`` is the position of the first of them."""
        self._start = start
        self._parts: tuple[list[_Part], ...] = tuple([] for _ in range(layers))

    def record(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        parts = self._parts[layer]
        while parts and parts[-1].start >= start:  # computed again after a preemption
            parts.pop()
        parts.append(_Part(start, key.clone(), value.clone()))

    @property
    def tokens(self) -> int:
        """The number of tokens whose KV is there in all layers."""
        return min(parts[-1].end if parts else self._start for parts in self._parts) - self._start

    def part(self, begin: int, end: int) -> ChunkKV:
        """Return the KV of the tokens [begin, end), which count from the first generated one."""
        first, last = self._start + begin, self._start + end
        return ChunkKV(tuple(_joined(parts, first, last) for parts in self._parts))


def _joined(parts: Sequence[_Part], first: int, last: int) -> LayerKV:
    """Join the KV of the positions [first, last)."""
    keys, values = [], []
    for part in parts:
        columns = slice(max(first - part.start, 0), max(last - part.start, 0))
        keys.append(part.key[:, columns])
        values.append(part.value[:, columns])
    return LayerKV(torch.cat(keys, dim=1), torch.cat(values, dim=1))
