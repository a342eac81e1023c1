"""Carries out a step's transfers: KV is placed, and runs go through the model in passes of limited
size."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from kvlinker.prompting.segments import Range
from kvlinker.store import ChunkKV
from kvlinker.store.memory.lane import Arrival, CopyLane, lane_to
from kvlinker_vllm.adapter import AttentionLayer, BoundModel, VirtualSequences
from kvlinker_vllm.protocol.steps import (
    NO_BLOCK,
    PlacedPart,
    StartedTransfer,
    TransferSlice,
)
from kvlinker_vllm.protocol.transfer_plan import COMPARED_LAYER
from kvlinker_vllm.worker.fused_placing import fused_placing
from kvlinker_vllm.worker.layers import (
    ChunkPart,
    GroupParts,
    Launch,
    layer_launches,
    place,
)
from kvlinker_vllm.worker.observing import QuestionObservation
from kvlinker_vllm.worker.recording import (
    ChunkCapture,
    KVComparison,
    RecordedRows,
    record_attention,
)

logger = logging.getLogger("kvlinker.vllm.worker.passes")


@dataclass(slots=True, eq=False)
class TransferTask:
    """The state of a request's transfer in a worker."""

    started: StartedTransfer

    loaded: Future[dict[str, ChunkKV] | None]
    """The plan's chunks by key, or None if one could not be loaded."""

    tokens: NDArray[np.int64]
    """The tokens that runs compute: the prompt's, without its unrelated text until it begins
    again."""

    recorder: ChunkCapture | KVComparison | QuestionObservation | None = None
    """The recorder that captures the plan's chunk, or measures for it."""

    alone: ChunkCapture | None = None
    """The capture without the unrelated text, which is complete, once the prompt has begun
    again."""

    load_reported: bool = False
    """True once the scheduler side knows that the chunks are in memory."""

    failed: bool = False

    def parts(self, bound: BoundModel, parts: Iterable[PlacedPart]) -> list[list[ChunkPart]]:
        """Return the parts' KV and its places, by group of layers. If a chunk does not fit the
        plan, the task has failed, and there are no parts."""
        placed: list[list[ChunkPart]] = [[] for _ in bound.groups]
        for part in parts:
            kv = self._kv(part)
            if kv is None:
                return [[] for _ in bound.groups]
            for group, found in enumerate(placed):
                for first, last in self._within(bound, group, part):
                    found.append(self._chunk_part(bound, group, part, kv, first, last))
        return placed

    def whole_parts(self, bound: BoundModel, begin: int, end: int) -> Iterator[ChunkPart]:
        """Yield the parts of the placements at positions [begin, end), whatever layers have room
        for; there are none if a chunk does not fit the plan, and the task has failed."""
        for index, placed in enumerate(self.started.plan.placements):
            if placed.begin < end and placed.end > begin:
                first = max(placed.first, begin - placed.start)
                part = PlacedPart(index, first, min(placed.last, end - placed.start))
                kv = self._kv(part)
                if kv is None:
                    return
                yield self._chunk_part(bound, 0, part, kv, part.first, part.last)

    def _kv(self, part: PlacedPart) -> ChunkKV | None:
        kvs = self.loaded.result()
        if kvs is None:
            self.failed = True
            return None
        key = self.started.plan.placements[part.placement].key
        if part.last > kvs[key].tokens:
            logger.error(
                "Chunk %s has %d tokens; %d are to be placed.", key, kvs[key].tokens, part.last
            )
            self.failed = True
            return None
        return kvs[key]

    def _within(self, bound: BoundModel, group: int, part: PlacedPart) -> Iterator[Range]:
        """Yield the ranges of a part's tokens for which the request has blocks in a group."""
        if bound.groups[group].window is None:
            yield part.first, part.last
            return
        start = self.started.plan.placements[part.placement].start
        ids, size = self.started.block_ids[group], bound.groups[group].block_size
        blocks = range((start + part.first) // size, -(-(start + part.last) // size))
        for has_block, run in groupby(blocks, lambda block: ids[block] != NO_BLOCK):
            first, *_, last = (*run,) * 2
            if has_block:
                yield (
                    max(part.first, first * size - start),
                    min(part.last, (last + 1) * size - start),
                )

    def _chunk_part(
        self, bound: BoundModel, group: int, part: PlacedPart, kv: ChunkKV, first: int, last: int
    ) -> ChunkPart:
        placed = self.started.plan.placements[part.placement]
        offsets = torch.arange(first, last)
        slots = bound.slots(group, self.started.block_ids[group], offsets + placed.start)
        positions, slots = bound.to_device(torch.stack([offsets + placed.rotary_start, slots]))
        return ChunkPart(kv, first, last, placed.start + first, positions, slots)


@dataclass(frozen=True, slots=True)
class _TaskRun:
    """A run over positions [begin, end) of a task, in a pass whose rows before ``first`` are other
    runs'."""

    task: TransferTask
    begin: int
    end: int
    first: int = 0


Launches = Callable[[GroupParts], Iterator[Launch]]
"""Yields the function that places parts in all layers; the first layers come first."""


class LanePlacing:
    """Places parts on a lane of their own, where there is one.

    Code that computes over them calls ``wait_for`` before it writes to or reads from a layer's
    cache, and ``wait_for_all`` before other code does.
    """

    def __init__(
        self, lane: CopyLane | None, layers: Sequence[AttentionLayer], launches: Launches
    ) -> None:
        self._lane = lane
        self._names = [layer.name for layer in layers]
        self._launches = launches
        self._under_way: dict[str, Arrival] = {}

    def place(self, parts: GroupParts) -> None:
        """Write all parts into the KV cache, sooner or later, after all parts that were placed
        before."""
        for layers, work in self._launches(parts):
            if self._lane is None:
                work()
            else:
                arrival = self._lane.launch(work, keeping=(work, parts))
                self._under_way.update(dict.fromkeys([self._names[n] for n in layers], arrival))

    def wait_for(self, name: str) -> None:
        """Let later computations wait for all parts in the layer of this name."""
        arrival = self._under_way.pop(name, None)
        if arrival is not None:
            arrival.wait()

    def wait_for_all(self) -> None:
        """Let later computations wait for all parts in all layers."""
        for name in list(self._under_way):
            self.wait_for(name)


class Passes:
    """Carries out slices of transfers."""

    def __init__(
        self,
        bound: BoundModel,
        layers: Sequence[AttentionLayer],
        *,
        tokens: int,
        runs: int,
        native: bool,
    ) -> None:
        """``tokens`` and ``runs`` are the most that one pass takes; ``native`` says whether code
        may be compiled for CPUs. Uses the first blocks of the KV cache, in which nothing may lie
        yet."""
        fused = fused_placing(bound, layers, native=native)
        launches = partial(layer_launches, layers) if fused is None else fused.launches
        lane = lane_to(bound.device)
        self._placing = LanePlacing(lane, layers, launches)
        self._observers_place = fused is None or lane is not None
        """True if a pass that observes places its chunks itself, so that keys are copied once. On
        CPUs, a kernel and another copy of the keys take less time."""

        self._bound = bound
        self._layers = layers
        self._tokens = tokens
        self._runs = runs

    def place(self, slices: Sequence[tuple[TransferTask, TransferSlice]]) -> None:
        """Place the chunks of all slices, before anything is computed; those of a request that is
        observed in a single pass may be left to it."""
        observed = [run for task, each in slices if _observes(task) for run in each.runs]
        one_pass = (
            self._observers_place
            and len(self._bound.groups) == 1
            and len(observed) <= self._runs
            and sum(end - begin for begin, end in observed) <= self._tokens
        )
        others = []
        for task, each in slices:
            if (
                isinstance(task.recorder, QuestionObservation)
                and one_pass
                and each.is_whole(task.started.plan)
            ):
                (parts,) = task.parts(self._bound, each.parts)
                task.recorder.unplaced = tuple(parts)
            else:
                others.append((task, each))
        self._placing.place(self._parts(each for each in others if not _compares(each[0])))
        compared = self._parts(each for each in others if _compares(each[0]))
        place(self._layers[:COMPARED_LAYER], compared)

    def settle(self) -> None:
        """Let the next computation wait for all placed parts."""
        self._placing.wait_for_all()

    def compute(self, slices: Sequence[tuple[TransferTask, TransferSlice]]) -> None:
        """Compute the slices' runs, each layer once all is placed in it. Raises the model's
        errors."""
        runs = [_TaskRun(task, *run) for task, each in slices for run in each.runs]
        for group in self._group(run for run in runs if run.task.recorder is None):
            self._forward(group)
        for kind, until in (
            (ChunkCapture, None),
            (QuestionObservation, None),  # by themselves: ``place`` counts on a single pass
            (KVComparison, COMPARED_LAYER),
        ):
            for group in self._group(run for run in runs if isinstance(run.task.recorder, kind)):
                rows = list(map(self._rows, group))
                with record_attention(self._bound, self._layers, rows, until=until):
                    self._forward(group, eager=True)

    def _forward(self, runs: Sequence[_TaskRun], *, eager: bool = False) -> None:
        sequences = self._sequences(runs)
        self._bound.forward(sequences, eager=eager, before_layer=self._placing.wait_for)

    def _parts(self, slices: Iterable[tuple[TransferTask, TransferSlice]]) -> GroupParts:
        parts: list[list[ChunkPart]] = [[] for _ in self._bound.groups]
        for task, each in slices:
            for group, own in zip(parts, task.parts(self._bound, each.parts), strict=True):
                group += own
        return parts

    def _group(self, runs: Iterable[_TaskRun]) -> Iterator[list[_TaskRun]]:
        """Group the runs, as many at once as a pass takes, and cut those that are longer than
        one."""
        group: list[_TaskRun] = []
        tokens = 0
        for run in runs:
            for begin in range(run.begin, run.end, self._tokens):
                end = min(begin + self._tokens, run.end)
                if group and (tokens + end - begin > self._tokens or len(group) == self._runs):
                    yield group
                    group, tokens = [], 0
                group.append(_TaskRun(run.task, begin, end, first=tokens))
                tokens += end - begin
        if group:
            yield group

    def _sequences(self, runs: Sequence[_TaskRun]) -> VirtualSequences:
        positions = [torch.arange(run.begin, run.end) for run in runs]
        tokens = [torch.from_numpy(run.task.tokens[run.begin : run.end]) for run in runs]
        slots = [
            [
                self._bound.slots(group, run.task.started.block_ids[group], own)
                for run, own in zip(runs, positions, strict=True)
            ]
            for group in range(len(self._bound.groups))
        ]
        rows = self._bound.to_device(
            torch.stack([torch.cat(each) for each in (tokens, positions, *slots)])
        )
        return VirtualSequences(
            tokens=rows[0],
            positions=rows[1],
            slots=rows[2:],
            query_lengths=[run.end - run.begin for run in runs],
            lengths=[run.end for run in runs],
            block_ids=[run.task.started.block_ids for run in runs],
        )

    def _rows(self, run: _TaskRun) -> RecordedRows:
        task = run.task
        parts: tuple[ChunkPart, ...] = ()
        assert task.recorder is not None
        match task.recorder:
            case KVComparison():
                parts = tuple(task.whole_parts(self._bound, run.begin, run.end))
            case QuestionObservation(unplaced=unplaced) if run.end == task.started.plan.linked:
                parts = unplaced or tuple(task.whole_parts(self._bound, 0, run.end))
        return RecordedRows(run.first, run.end - run.begin, run.begin, task.recorder, parts)


def _compares(task: TransferTask) -> bool:
    return isinstance(task.recorder, KVComparison)


def _observes(task: TransferTask) -> bool:
    return isinstance(task.recorder, QuestionObservation)
