"""Says what the queries of a batch see, layer by layer: segments of KV, and views of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from kvlinker.engines.embedded.attention.kernel import AttentionKernel
from kvlinker.engines.embedded.attention.views import AttentionPlan, View
from kvlinker.engines.embedded.execution.batch import Batch, VisibleKV
from kvlinker.engines.embedded.execution.layers_ahead import LayersAhead
from kvlinker.engines.embedded.kv_cache.pool import KVPool, SlotSpan
from kvlinker.engines.embedded.model.anatomy import LayerShape, kept_by
from kvlinker.store.chunk_kv import LayerKV
from kvlinker.store.loading.arriving import KV


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
        self._chunks = {contents[name]: kv for name, kv in chunks.items()}
        self._spans = tuple({span: None for visible, _ in self._sights for span in visible.spans})
        numbers = {name: number for number, name in enumerate((*self._chunks, *self._spans))}
        self._chunk_segments = {name: numbers[content] for name, content in contents.items()}
        self._span_segments = {span: numbers[span] for span in self._spans}
        self._plans: dict[tuple[int, ...], tuple[tuple[View, ...], AttentionPlan]] = {}

    def plan(self, index: int) -> tuple[tuple[View, ...], AttentionPlan]:
        """Return what all queries see in this layer; it is the same in all layers of the same
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

    def plans(self) -> list[AttentionPlan]:
        """Return what all queries see in each layer."""
        if all(visible.own.all_stay for visible, _ in self._sights):
            return [self.plan(0)[1]] * len(self._layers)
        return [self.plan(index)[1] for index in range(len(self._layers))]

    @property
    def chunks(self) -> tuple[KV, ...]:
        """The chunks of which each is a segment, before all others."""
        return tuple(self._chunks.values())

    @property
    def spans(self) -> tuple[SlotSpan, ...]:
        """The spans of the pool that are the segments behind the chunks."""
        return self._spans

    def layer(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """Return key and value of all segments in this layer. Latents are part of both, behind the
        shared key."""
        kept = self._kept_by[index]
        key, value = self._pool.keys[kept], self._pool.values[kept]
        layers = self._ahead.layer(tuple(self._chunks.values()), kept)
        for slot, size in self._spans:
            layers.append(LayerKV(key[:, slot : slot + size], value[:, slot : slot + size]))
        if self._layers[index].latents is not None:
            return [(joined, joined) for joined in (each.joined for each in layers)]
        return [(each.key, each.value) for each in layers]

    def indices(self, index: int) -> list[Tensor]:
        """Return what this layer's indexer keeps of all segments: [1, tokens, dim] each."""
        kept = self._kept_by[index]
        pool = self._pool.indices[kept]
        layers = self._ahead.layer(tuple(self._chunks.values()), kept)
        found = [each.index for each in layers if each.index is not None]
        assert pool is not None, "a layer without an indexer has no such segments"
        assert len(found) == len(layers), "chunks are kept as the model computes them"
        return [*found, *(pool[:, slot : slot + size] for slot, size in self._spans)]

    def _views(self, visible: VisibleKV, rows: slice, epoch: int) -> Iterator[View]:
        """Yield what one sequence's queries see in the layers of an epoch."""
        for chunk, hidden in zip(visible.shared, visible.own.hidden(epoch), strict=True):
            segment = self._chunk_segments[id(chunk.kv)]
            yield View(segment, rows, chunk.start, chunk.offset, chunk.first, chunk.last, hidden)
        gone = visible.own.gone(epoch, len(visible.positions))
        end = 0
        for span in visible.spans:
            begin, end = end, end + span.size
            positions = visible.positions[begin:end]
            hidden = None if gone is None else gone[begin:end]
            start = int(positions[0])
            scattered = None if int(positions[-1]) + 1 - start == span.size else positions
            yield View(self._span_segments[span], rows, start, 0, 0, span.size, hidden, scattered)


def _content(kv: KV) -> int:
    """Return a name of the tensors: what arrives for two requests may be the same ones."""
    return id(kv.layer(0) or kv)
