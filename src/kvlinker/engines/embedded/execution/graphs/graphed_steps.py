"""Computes steps on a GPU by replaying graphs: all kernels of a step of one size, launched at once.
Python, which launches them one by one otherwise, takes longer for that than the GPU for most
steps."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.embedded.attention.triton_attention import TritonAttention
from kvlinker.engines.embedded.execution.batch import Batch, BatchSegments, StepResult
from kvlinker.engines.embedded.execution.graphs.step_graph import (
    Forward,
    Replay,
    StepGraph,
    StepSize,
    StepTables,
)
from kvlinker.engines.embedded.execution.layers_ahead import LayersAhead
from kvlinker.engines.embedded.kv_cache.pool import KVPool, SlotSpan
from kvlinker.engines.embedded.model.anatomy import LayerShape, kept_by
from kvlinker.engines.gpu.launching import addresses, is_aligned
from kvlinker.store.chunk_kv import LayerKV

ROW_LIMIT = 2048
"""The most tokens of a step that is computed so. Launching longer ones takes less time than
computing them."""

SEEN_BEFORE = 1
"""The steps of a size that are computed otherwise before one is captured, which takes as long as
two or three of them."""

GRAPH_LIMIT = 64
"""The graphs that are kept, the last used ones."""

CAPTURE_LIMIT = 8
"""How often steps of one size are captured, as their tables outgrow the graph's, without any graph
that was worth it."""

WORTH_IT = 32
"""The replays that are worth a capture."""

SIZE_LIMIT = 4096
"""The sizes that are remembered, with and without a graph."""

KEY, VALUE, KEY_ROW, VALUE_ROW = 0, 1, 3, 5
"""The fields of a segment's ``addresses`` that differ among spans of the pool, and their strides
from row to row."""

logger = logging.getLogger(__name__)


class GraphedSteps:
    """Computes the steps of one pool. It is not thread safe: the engine's thread owns it."""

    def __init__(
        self,
        forward: Forward,
        layers: Sequence[LayerShape],
        windows: Sequence[int | None],
        pool: KVPool,
        kernel: TritonAttention,
        ahead: LayersAhead,
        *,
        capture: Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]] | None = None,
    ) -> None:
        """``windows`` has that of each layer's attention. ``capture`` returns what launches again
        what a function launches, and where its result is then: a graph's, by default."""
        self._forward = forward
        self._layers = layers
        self._windows = windows
        self._pool = pool
        self.kernel = kernel
        self._ahead = ahead
        self._capture = capture or GraphCapture()
        self._addresses = _SegmentAddresses(layers, pool)
        for rotary in {layer.rotary for layer in layers if layer.rotary is not None}:
            rotary.tables(min(rotary.longest, pool.slots))  # which then stay where they are
        self._seen: Counter[StepSize] = Counter()
        self._captures: Counter[StepSize] = Counter()
        self._graphs: OrderedDict[StepSize, StepGraph] = OrderedDict()
        self.replays = 0
        self._replays: Counter[StepSize] = Counter()  # since a size was captured
        self.obstacle: str | None = None
        """Why no more graphs are captured."""

    def compute(self, batch: Batch) -> StepResult | None:
        """Compute all runs of the batch; None, and nothing is computed, where no graph does."""
        found = self._result(batch)
        if found is None:
            self._addresses.forget()
        return found

    def _result(self, batch: Batch) -> StepResult | None:
        tokens = sum(len(run.tokens) for run in batch.runs)
        if not batch.is_plain or batch.observed or batch.captured or tokens > ROW_LIMIT:
            return None
        segments = BatchSegments(batch, self._layers, self._pool, self.kernel, self._ahead)
        plans, numbers = segments.plans()
        size = StepSize.of(batch, tuple(numbers))
        if len(self._seen) > SIZE_LIMIT:
            self._seen.clear()
            self._captures.clear()
        self._seen[size] += 1
        may_capture = self.obstacle is None and self._captures[size] < CAPTURE_LIMIT
        if self._seen[size] <= SEEN_BEFORE or not (may_capture or size in self._graphs):
            return None
        chunks = self._ahead.whole(segments.chunks)
        table = None if chunks is None else self._addresses.of(chunks, segments.spans)
        if table is None:
            return None
        tables = StepTables(batch, size, plans, table, self._layers, self._windows)
        replays = self.replays
        logits = self._computed(tables)
        if logits is None:
            return None
        owners = batch.logit_owners
        found = dict(zip(owners, logits[: len(owners)].float().cpu(), strict=True))
        if not owners and self._pool.device.type == "cuda":  # nothing has been waited for
            torch.cuda.current_stream(self._pool.device).synchronize()
        return StepResult(found, {}, {}, is_usual=self.replays > replays)

    def _computed(self, tables: StepTables) -> Tensor | None:
        """Return the logits that are wanted, and others behind them; None where there is no graph
        for the step, and none is captured."""
        size = tables.size
        graph = self._graphs.get(size)
        if graph is not None and graph.takes(tables):
            self._graphs.move_to_end(size)
            self.replays += 1
            self._replays[size] += 1
            return graph.replayed(tables)
        if self._replays.pop(size, 0) >= WORTH_IT:
            self._captures[size] = 0
        self._captures[size] += 1
        if self.obstacle is not None or self._captures[size] > CAPTURE_LIMIT:
            self._graphs.pop(size, None)
            logger.info("Graphs of steps of %d tokens are outgrown too often.", size.rows)
            return None
        try:
            graph = StepGraph(tables, self._layers, self._pool, outgrown=graph)
        except torch.OutOfMemoryError:
            return None
        logits = graph.computed(tables, self._forward)
        try:
            graph.capture(self._capture, self._forward)
        except Exception as error:  # whatever the driver, or the model's code, raises
            self.obstacle = str(error)
            logger.warning("No more steps are captured as graphs: %s", error)
            return logits
        self._graphs[size] = graph
        if len(self._graphs) > GRAPH_LIMIT:
            self._graphs.popitem(last=False)
        return logits


class GraphCapture:
    """Captures graphs of a CUDA device on a stream of its own. They share their memory: one runs
    after the other."""

    _one_at_a_time = threading.Lock()

    def __init__(self) -> None:
        self._pool: Any = None  # the name of the memory

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        with self._one_at_a_time:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            before = torch.cuda.current_stream()
            stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    result = compute()
                finally:
                    graph.capture_end()
            before.wait_stream(stream)
        return graph.replay, result


class _SegmentAddresses:
    """Finds segments in the device's memory, in all layers at once, as kernels read them. Those of
    a chunk are remembered from step to step."""

    def __init__(self, layers: Sequence[LayerShape], pool: KVPool) -> None:
        self._kept_by = np.array(kept_by(layers))
        pairs = list(zip(pool.keys, pool.values, strict=True))
        self._pool = np.array(addresses(pairs), np.int64)
        self._itemsize = pool.dtype.itemsize
        self._aligned = is_aligned([tensor for pair in pairs for tensor in pair])
        self._chunks: dict[int, tuple[Sequence[LayerKV], NDArray[np.int64] | None]] = {}

    def of(
        self, chunks: Sequence[Sequence[LayerKV]], spans: Sequence[SlotSpan]
    ) -> NDArray[np.int64] | None:
        """Return the ``addresses`` of each chunk's layers, then of each span of the pool, in every
        layer of the model: [layers, segments, 6]; None unless all begin at multiples of 16
        bytes."""
        self._chunks = {id(chunk): self._chunk(chunk) for chunk in chunks}
        found = [self._chunks[id(chunk)][1] for chunk in chunks]
        tables = [each[:, None] for each in found if each is not None]
        if len(tables) < len(found) or not self._aligned:
            return None
        slots = np.array([span.slot for span in spans], np.int64)
        own = np.repeat(self._pool[:, None], len(spans), axis=1)
        for at, row in ((KEY, KEY_ROW), (VALUE, VALUE_ROW)):
            own[:, :, at] += slots * self._pool[:, None, row] * self._itemsize
        table: NDArray[np.int64] = np.concatenate([*tables, own], axis=1)[self._kept_by]
        return table

    def forget(self) -> None:
        """Keep no chunk."""
        self._chunks.clear()

    def _chunk(
        self, layers: Sequence[LayerKV]
    ) -> tuple[Sequence[LayerKV], NDArray[np.int64] | None]:
        """Return the layers, and where they are, if they are aligned."""
        known = self._chunks.get(id(layers))
        if known is not None:
            return known
        pairs = [(layer.key, layer.value) for layer in layers]
        aligned = is_aligned([tensor for pair in pairs for tensor in pair])
        return layers, np.array(addresses(pairs), np.int64) if aligned else None
