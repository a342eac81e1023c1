"""Describes the work of one step: runs of many requests, and the KV that their queries see."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.contract.observation import Observer
from kvlinker.engines.embedded.attention.kernel import AttentionKernel, AttentionPlan, View
from kvlinker.engines.embedded.attention.native_kernel import heads
from kvlinker.engines.embedded.decoding.logprobs import LogprobCollector
from kvlinker.engines.embedded.execution.capturing import Recorder
from kvlinker.engines.embedded.execution.layers_ahead import LayersAhead, layer_of
from kvlinker.engines.embedded.kv_cache.pool import KVPool, SlotSpan
from kvlinker.engines.embedded.kv_cache.states import SequenceState
from kvlinker.engines.embedded.model.anatomy import LayerShape
from kvlinker.linking.plan import DroppedTokens
from kvlinker.linking.refinement import Refinement
from kvlinker.store.chunk_kv import LayerKV
from kvlinker.store.loading.arriving import KV, ArrivingKV


@dataclass(frozen=True, slots=True, eq=False)
class SharedChunk:
    """A chunk's resident KV as one sequence sees it: any number of sequences may see it at the same
    time, each at another position."""

    kv: KV

    start: int
    """The position of the chunk's token 0 in the sequence."""

    rotary_start: int
    """The position from which the keys' rotary embedding counts; it is ``start``, except in
    ablations."""

    first: int
    last: int
    """Tokens [first, last) of the chunk are seen."""


class OwnTokens:
    """The layers in which a prompt's computed tokens are the sequence's own: from the first layer
    on, until a policy drops them. A token that is its own in a layer hides its copy in a shared
    chunk there.

    Layers are distinguished by their *epoch*, the number of times that tokens were dropped up to
    them.
    """

    def __init__(
        self,
        positions: NDArray[np.int64],
        shared: Sequence[SharedChunk],
        dropped: Sequence[DroppedTokens] = (),
    ) -> None:
        """``positions`` [computed], ascending, are those of the prompt's computed tokens.
        ``dropped`` may grow."""
        self.positions = positions
        self.dropped = dropped
        self._shared = tuple(shared)
        self._hidden: dict[int, tuple[NDArray[np.bool_] | None, ...]] = {}

    def epoch(self, layer: int) -> int:
        """Return the layer's epoch."""
        return bisect_right(self.dropped, layer, key=itemgetter(0)) if self.dropped else 0

    def dropped_mask(self, epoch: int, count: int) -> NDArray[np.bool_]:
        """Mask the first ``count`` of the sequence's own tokens that are dropped up to an epoch:
        [count]."""
        mask = np.zeros(count, dtype=np.bool_)
        for _, positions in self.dropped[:epoch]:
            mask[np.searchsorted(self.positions, positions)] = True
        return mask

    def hidden(self, epoch: int) -> tuple[NDArray[np.bool_] | None, ...]:
        """Mask, for every shared chunk, the tokens that are the sequence's own: [tokens]; None if
        none is."""
        if epoch not in self._hidden:
            own = self.positions
            if epoch:
                own = own[~self.dropped_mask(epoch, len(own))]
            self._hidden[epoch] = tuple(
                [_inside(own, chunk.start, chunk.kv.tokens) for chunk in self._shared]
            )
        return self._hidden[epoch]


def _inside(positions: NDArray[np.int64], start: int, length: int) -> NDArray[np.bool_] | None:
    """Mask the ``positions`` in [start, start + length): [length]; None if there are none."""
    first, last = np.searchsorted(positions, [start, start + length])
    if first == last:
        return None
    mask = np.zeros(length, dtype=np.bool_)
    mask[positions[first:last] - start] = True
    return mask


@dataclass(frozen=True, slots=True, eq=False)
class VisibleKV:
    """The KV that a sequence's queries see in one step: shared chunks, and its own tokens in the
    pool."""

    shared: tuple[SharedChunk, ...]

    spans: tuple[SlotSpan, ...]
    """Where its own tokens lie in the pool, in order; several sequences may see the same span."""

    positions: NDArray[np.int64]
    """The positions of its own tokens, ascending, up to the last that this step computes."""

    own: OwnTokens

    state: SequenceState | None = None
    """The state after the tokens before, in layers that keep one; None before the first token."""

    marks: tuple[int, ...] = ()
    """Positions, ascending: the state after the tokens before each is wanted, too."""


@dataclass(frozen=True, slots=True)
class Run:
    """Positions [start, start + len(tokens)) of one request, to be computed now."""

    slots: NDArray[np.int64]
    """The slots of the pool where its tokens lie: [tokens]."""

    start: int
    tokens: NDArray[np.int64]

    wants_logits: bool = False
    """True if the last token's logits are needed."""

    capture: Recorder | None = None
    """Collects the KV of its tokens."""

    refinement: Refinement | None = None
    """Decides which tokens are dropped between layers. It is the same for all runs of a request,
    and never comes with ``capture``."""

    observer: Observer | None = None
    """Observes the attention of this run's queries."""

    logprobs: LogprobCollector | None = None
    """Collects from the last hidden states of fresh tokens."""

    owner: object = None
    """The sequence that the run belongs to; a step's results are keyed by it."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Batch:
    """The work of one step. The runs of a sequence are neighbours, disjoint and ascending;
    ``visible_kv`` has the KV that each owner of a run sees."""

    runs: tuple[Run, ...]
    visible_kv: Mapping[object, VisibleKV]

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """The token ids of all runs: [tokens]."""
        return np.concatenate([run.tokens for run in self.runs])

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """The position of every token in its own request: [tokens]."""
        runs = self.runs
        return np.concatenate([np.arange(run.start, run.start + len(run.tokens)) for run in runs])

    @cached_property
    def slots(self) -> NDArray[np.int64]:
        """The slot of the pool that holds each token's KV: [tokens]."""
        return np.concatenate([run.slots for run in self.runs])

    @cached_property
    def rows(self) -> list[tuple[Run, slice]]:
        """Every run with the tokens of the batch that it has."""
        begin = 0
        found: list[tuple[Run, slice]] = []
        for run in self.runs:
            end = begin + len(run.tokens)
            found.append((run, slice(begin, end)))
            begin = end
        return found

    @cached_property
    def owner_rows(self) -> list[tuple[object, slice]]:
        """Every owner with the tokens of the batch that its runs have."""
        found: dict[object, slice] = {}
        for run, rows in self.rows:
            first = found.get(run.owner, rows)
            found[run.owner] = slice(first.start, rows.stop)
        return list(found.items())

    @cached_property
    def shared(self) -> list[tuple[object, SharedChunk]]:
        """All shared chunks with the owners that see them, in the order of the runs."""
        found = []
        for owner, _ in self.owner_rows:
            for chunk in self.visible_kv[owner].shared:
                found.append((owner, chunk))
        return found

    @cached_property
    def observed(self) -> list[tuple[Run, slice]]:
        """The runs whose attention is observed, with the tokens of the batch that they have."""
        return [each for each in self.rows if each[0].observer is not None]

    @cached_property
    def captured(self) -> list[tuple[Run, slice]]:
        """The runs whose KV is captured, with the tokens of the batch that they have."""
        return [each for each in self.rows if each[0].capture is not None]

    def capture(self, layer: int, kv: LayerKV) -> None:
        """Let the runs whose KV is captured have theirs in one of the layers that keep any; ``kv``
        is that of all tokens, un-rotated."""
        for run, rows in self.captured:
            assert run.capture is not None
            mine = LayerKV.of_parts([part[:, rows] for part in kv.parts])
            run.capture.record(layer, run.start, mine)

    @property
    def logit_rows(self) -> list[int]:
        """The tokens whose logits are wanted, by their index in the batch."""
        return [rows.stop - 1 for run, rows in self.rows if run.wants_logits]

    @property
    def logit_owners(self) -> list[object]:
        """The owners of ``logit_rows``, in the same order."""
        return [run.owner for run in self.runs if run.wants_logits]

    @property
    def is_plain(self) -> bool:
        """True if its tokens are only computed, and perhaps observed or captured: none is scored or
        dropped, and all chunks are there."""
        for run in self.runs:
            if run.refinement is not None or run.logprobs is not None:
                return False
        for _, chunk in self.shared:
            if isinstance(chunk.kv, ArrivingKV) and not chunk.kv.complete:
                return False
        return True

    @property
    def owners(self) -> set[object]:
        """The sequences that have runs here."""
        return {run.owner for run in self.runs}

    def refinements(self) -> Iterator[tuple[Refinement, slice, VisibleKV]]:
        """Yield every refinement with its request's tokens in the batch, and the KV that they
        see."""
        for owner, rows in self.owner_rows:
            refinement = next(run.refinement for run in self.runs if run.owner is owner)
            if refinement is not None:
                yield refinement, rows, self.visible_kv[owner]

    def without(self, owners: set[object]) -> NDArray[np.bool_]:
        """Mask of the tokens that belong to none of these owners: [tokens]."""
        return np.repeat(
            [run.owner not in owners for run in self.runs], [len(run.tokens) for run in self.runs]
        )

    def narrowed(self, keep: NDArray[np.bool_]) -> Batch:
        """Return the batch without the tokens where ``keep`` [tokens] is false."""
        found = self.rows
        run_of = np.repeat(np.arange(1, len(found) + 1), [len(run.tokens) for run in self.runs])
        labels = np.where(keep, run_of, 0)  # a kept token's run, 0 for dropped ones
        edges = np.flatnonzero(np.diff(labels, prepend=0, append=0)).tolist()
        runs = []
        for begin, end in pairwise(edges):
            if labels[begin]:
                run, rows = found[labels[begin] - 1]
                part = slice(begin - rows.start, end - rows.start)
                runs.append(
                    replace(
                        run,
                        slots=run.slots[part],
                        start=run.start + part.start,
                        tokens=run.tokens[part],
                        wants_logits=run.wants_logits and end == rows.stop,
                    )
                )
        return Batch(tuple(runs), self.visible_kv)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step, by owner. An owner that appears in neither field asked for no
    logits."""

    logits: dict[object, Tensor]
    """The last token's logits [vocabulary], fp32, on the CPU, for every owner that wanted them and
    did not leave."""

    late: dict[object, int]
    """The owners that left the step because a chunk's layer had not arrived, each with the first
    layer that was missing."""

    states: dict[object, tuple[SequenceState, ...]]
    """The state after the tokens so far, in layers that keep one, for every owner that did not
    leave; empty for a model without such layers."""

    is_usual: bool = True
    """False if more was done than to compute it, so that its time says nothing about others'."""


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
        """``ahead`` copies the chunks' layers to the device."""
        self._layers = layers
        self._pool = pool
        self._kernel = kernel
        self._ahead = ahead
        self._positions = batch.positions
        self._sights = [(batch.visible_kv[owner], rows) for owner, rows in batch.owner_rows]
        self._chunk_segments: dict[int, int] = {}
        self._span_segments: dict[SlotSpan, int] = {}
        self._plans: dict[tuple[int, ...], tuple[tuple[View, ...], AttentionPlan]] = {}
        numbers: dict[int, int] = {}
        chunks: dict[int, KV] = {}
        for _, chunk in batch.shared if layers else ():
            if id(chunk.kv) not in self._chunk_segments:
                # the first layer names the tensors: two requests' arriving KV may have the same
                content = id(chunk.kv.layer(0) or chunk.kv)
                number = numbers.setdefault(content, len(numbers))
                self._chunk_segments[id(chunk.kv)] = number
                chunks[number] = chunk.kv
        for visible, _ in self._sights:
            for span in visible.spans:
                self._span_segments.setdefault(span, len(chunks) + len(self._span_segments))
        self.chunks: tuple[KV, ...] = tuple(chunks.values())
        """The chunks of which each is a segment, before all others."""

        self.spans = tuple(self._span_segments)
        """The spans of the pool that are the segments after the chunks."""

    def plan(self, index: int) -> tuple[tuple[View, ...], AttentionPlan]:
        """Return the views of all queries in this layer; it is the same in all layers of the same
        epochs."""
        source = self._layers[index].source
        computed = index if source is None else source
        epochs = tuple([visible.own.epoch(computed) for visible, _ in self._sights])
        if epochs not in self._plans:
            views: list[View] = []
            for (visible, rows), epoch in zip(self._sights, epochs, strict=True):
                views += self._views(visible, rows, epoch)
            self._plans[epochs] = tuple(views), self._kernel.plan(views, self._positions)
        return self._plans[epochs]

    def plans(self) -> tuple[list[AttentionPlan], list[int]]:
        """Return the views of all queries in all layers, each once, and the index of each layer's
        among them."""
        if not any(visible.own.dropped for visible, _ in self._sights):
            return [self.plan(0)[1]], [0] * len(self._layers)
        plans = [self.plan(index)[1] for index in range(len(self._layers))]
        distinct = {id(plan): plan for plan in plans}
        numbers = {name: number for number, name in enumerate(distinct)}
        return list(distinct.values()), [numbers[id(plan)] for plan in plans]

    def layer(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """Return key and value of all segments in this layer. Latents are part of both, after the
        shared key."""
        kept = self._pool.kept_by[index]
        key, value = self._pool.keys[kept], self._pool.values[kept]
        layers = self._ahead.layer(self.chunks, kept)
        for slot, size in self.spans:
            layers.append(LayerKV(key[:, slot : slot + size], value[:, slot : slot + size]))
        if self._layers[index].latents is not None:
            return [(joined, joined) for joined in (each.joined for each in layers)]
        return [(each.key, each.value) for each in layers]

    def indices(self, index: int) -> list[Tensor]:
        """Return this layer's indexer's data of all segments: [1, tokens, dim] each."""
        kept = self._pool.kept_by[index]
        pool = self._pool.indices[kept]
        layers = self._ahead.layer(self.chunks, kept)
        found = [each.index for each in layers if each.index is not None]
        assert pool is not None, "a layer without an indexer has no such segments"
        assert len(found) == len(layers), "chunks are kept as the model computes them"
        return [*found, *(pool[:, slot : slot + size] for slot, size in self.spans)]

    def _views(self, visible: VisibleKV, rows: slice, epoch: int) -> list[View]:
        """Return the views of one sequence's queries in the layers of an epoch."""
        views = []
        for chunk, hidden in zip(visible.shared, visible.own.hidden(epoch), strict=True):
            segment, start = self._chunk_segments[id(chunk.kv)], chunk.start
            views.append(
                View(segment, rows, start, chunk.rotary_start, chunk.first, chunk.last, hidden)
            )
        dropped = visible.own.dropped_mask(epoch, len(visible.positions)) if epoch else None
        end = 0
        for span in visible.spans:
            begin, end = end, end + span.size
            positions = visible.positions[begin:end]
            hidden = None if dropped is None else dropped[begin:end]
            start = int(positions[0])
            scattered = None if int(positions[-1]) + 1 - start == span.size else positions
            segment = self._span_segments[span]
            views.append(View(segment, rows, start, 0, 0, span.size, hidden, scattered))
        return views


class SegmentTable:
    """Finds the addresses of segments in memory, in all layers at once, as native code reads them.
    Those of a chunk are remembered as long as the chunk exists."""

    def __init__(self, pool: KVPool) -> None:
        self._kept_by = np.array(pool.kept_by)
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
