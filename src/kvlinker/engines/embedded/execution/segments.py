"""The segments of KV that the queries of a batch see, layer by layer, views of them, and their
addresses in memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.embedded.attention.kernel import AttentionKernel
from kvlinker.engines.embedded.attention.native_call import heads
from kvlinker.engines.embedded.attention.views import AttentionPlan, View
from kvlinker.engines.embedded.execution.batch import Batch, VisibleKV
from kvlinker.engines.embedded.execution.layers_ahead import LayersAhead, layer_of
from kvlinker.engines.embedded.kv_cache.pool import KVPool, SlotSpan
from kvlinker.engines.embedded.model.anatomy import LayerShape, kept_by
from kvlinker.store.chunk_kv import LayerKV
from kvlinker.store.loading.arriving import KV

DATA, ROWS, STRIDE = 0, 2, 5
"""The fields of a segment's ``Heads``, of call.h, that differ among spans of the pool, and the
stride from row to row."""

HEADS_FIELDS = 6
"""The fields of ``Heads``; a segment has those of its keys, then those of its values."""


class BatchSegments:
    """The segments that one batch attends to: its shared chunks, then spans of the pool."""

    def __init__(
        self,
        batch: Batch,
        layers: Sequence[LayerShape],
        pool: KVPool,
        kernel: AttentionKernel,
        ahead: LayersAhead,
    ) -> None:
        """``ahead`` brings the chunks' layers to the device."""
        self._layers = layers
        self._kept_by = kept_by(layers)
        self._pool = pool
        self._kernel = kernel
        self._ahead = ahead
        self._positions = batch.positions
        self._sights = [(batch.visible_kv[owner], rows) for owner, rows in batch.owner_rows()]
        chunks = {id(chunk.kv): chunk.kv for _, chunk in batch.shared()} if layers else {}
        contents = {name: _content(kv) for name, kv in chunks.items()}
        distinct = {contents[name]: kv for name, kv in chunks.items()}
        self.chunks: tuple[KV, ...] = tuple(distinct.values())
        """The chunks of which each is a segment, before all others."""

        self.spans = tuple({span: None for visible, _ in self._sights for span in visible.spans})
        """The spans of the pool that are the segments after the chunks."""

        numbers = {name: number for number, name in enumerate((*distinct, *self.spans))}
        self._chunk_segments = {name: numbers[content] for name, content in contents.items()}
        self._span_segments = {span: numbers[span] for span in self.spans}
        self._plans: dict[tuple[int, ...], tuple[tuple[View, ...], AttentionPlan]] = {}

    def plan(self, index: int) -> tuple[tuple[View, ...], AttentionPlan]:
        """Return the views of all queries in this layer; it is the same in all layers of the same
        epochs."""
        source = self._layers[index].source
        computed = index if source is None else source
        epochs = tuple(visible.own.epoch(computed) for visible, _ in self._sights)
        if epochs not in self._plans:
            views = [
                view
                for (visible, rows), epoch in zip(self._sights, epochs, strict=True)
                for view in self._views(visible, rows, epoch)
            ]
            self._plans[epochs] = tuple(views), self._kernel.plan(views, self._positions)
        return self._plans[epochs]

    def plans(self) -> tuple[list[AttentionPlan], list[int]]:
        """Return the views of all queries in all layers, each once, and which of them each layer
        has."""
        if all(visible.own.all_stay for visible, _ in self._sights):
            return [self.plan(0)[1]], [0] * len(self._layers)
        plans = [self.plan(index)[1] for index in range(len(self._layers))]
        distinct = {id(plan): plan for plan in plans}
        numbers = {name: number for number, name in enumerate(distinct)}
        return list(distinct.values()), [numbers[id(plan)] for plan in plans]

    def layer(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """Return key and value of all segments in this layer. Latents are part of both, after the
        shared key."""
        kept = self._kept_by[index]
        key, value = self._pool.keys[kept], self._pool.values[kept]
        layers = self._ahead.layer(self.chunks, kept)
        for slot, size in self.spans:
            layers.append(LayerKV(key[:, slot : slot + size], value[:, slot : slot + size]))
        if self._layers[index].latents is not None:
            return [(joined, joined) for joined in (each.joined for each in layers)]
        return [(each.key, each.value) for each in layers]

    def indices(self, index: int) -> list[Tensor]:
        """Return this layer's indexer's data of all segments: [1, tokens, dim] each."""
        kept = self._kept_by[index]
        pool = self._pool.indices[kept]
        layers = self._ahead.layer(self.chunks, kept)
        found = [each.index for each in layers if each.index is not None]
        assert pool is not None, "a layer without an indexer has no such segments"
        assert len(found) == len(layers), "chunks are kept as the model computes them"
        return [*found, *(pool[:, slot : slot + size] for slot, size in self.spans)]

    def _views(self, visible: VisibleKV, rows: slice, epoch: int) -> Iterator[View]:
        """Yield the views of one sequence's queries in the layers of an epoch."""
        for chunk, hidden in zip(visible.shared, visible.own.hidden(epoch), strict=True):
            segment = self._chunk_segments[id(chunk.kv)]
            yield View(
                segment, rows, chunk.start, chunk.rotary_start, chunk.first, chunk.last, hidden
            )
        gone = visible.own.gone(epoch, len(visible.positions))
        end = 0
        for span in visible.spans:
            begin, end = end, end + span.size
            positions = visible.positions[begin:end]
            hidden = None if gone is None else gone[begin:end]
            start = int(positions[0])
            scattered = None if int(positions[-1]) + 1 - start == span.size else positions
            yield View(self._span_segments[span], rows, start, 0, 0, span.size, hidden, scattered)


class SegmentTable:
    """Finds the addresses of segments in memory, in all layers at once, as native code reads them.
    Those of a chunk are remembered as long as the chunk exists."""

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


def _content(kv: KV) -> int:
    """Return a name of the tensors: what arrives for two requests may be the same ones."""
    return id(kv.layer(0) or kv)
