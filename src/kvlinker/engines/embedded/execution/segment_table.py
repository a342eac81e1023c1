"""Where the segments of a step lie in memory, in all layers at once, as native code reads them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvlinker.engines.embedded.attention.native_call import heads
from kvlinker.engines.embedded.execution.layers_ahead import layer_of
from kvlinker.engines.embedded.kv_cache.pool import KVPool, SlotSpan
from kvlinker.engines.embedded.model.anatomy import LayerShape, kept_by
from kvlinker.store.loading.arriving import KV

DATA, ROWS, STRIDE = 0, 2, 5
"""The fields of a segment's ``Heads``, of call.h, that differ among spans of the pool, and the
stride from row to row."""

HEADS_FIELDS = 6
"""The fields of ``Heads``; a segment has those of its keys, then those of its values."""


class SegmentTable:
    """Makes the tables. What it finds out of a chunk it remembers as long as there is the chunk."""

    def __init__(self, layers: Sequence[LayerShape], pool: KVPool) -> None:
        self._kept_by = np.array(kept_by(layers))
        pairs = zip(pool.keys, pool.values, strict=True)
        self._pool = np.array([heads(key) + heads(value) for key, value in pairs], np.int64)
        self._chunks: dict[int, tuple[weakref.ref[KV], NDArray[np.int64]]] = {}

    def of(self, chunks: Sequence[KV], spans: Sequence[SlotSpan]) -> NDArray[np.int64]:
        """Return the ``Segment`` of call.h of each chunk, then of each span of the pool, in every
        layer: [layers, segments, fields]."""
        parts = [self._spans(spans)]
        if chunks:
            known = {id(chunk): self._chunk(chunk) for chunk in chunks}
            self._chunks = known
            parts.insert(0, np.stack([known[id(chunk)][1] for chunk in chunks], axis=1))
        else:
            self._chunks.clear()
        table: NDArray[np.int64] = np.concatenate(parts, axis=1)[self._kept_by]
        return table

    def _spans(self, spans: Sequence[SlotSpan]) -> NDArray[np.int64]:
        slots, sizes = np.array(spans, np.int64).reshape(-1, 2).T
        table = np.repeat(self._pool[:, None], len(spans), axis=1)
        for first in (0, HEADS_FIELDS):
            stride = self._pool[:, None, first + STRIDE]
            table[:, :, first + DATA] += slots * stride * torch.bfloat16.itemsize
            table[:, :, first + ROWS] = sizes
        return table

    def _chunk(self, chunk: KV) -> tuple[weakref.ref[KV], NDArray[np.int64]]:
        """Return the chunk's segment in every layer that is kept, with what says that it is the
        same chunk."""
        known = self._chunks.get(id(chunk))
        if known is not None and known[0]() is chunk:
            return known
        layers = [layer_of(chunk, index) for index in range(len(self._pool))]
        table = np.array([heads(each.key) + heads(each.value) for each in layers], np.int64)
        return weakref.ref(chunk), table
