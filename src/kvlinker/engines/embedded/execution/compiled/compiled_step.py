"""Computes steps by the program of a model's pass: in native code, without the model's modules."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from kvlinker.engines import native
from kvlinker.engines.embedded.attention.native_kernel import NativeAttention, NativePlan, Rotation
from kvlinker.engines.embedded.execution.batch import Batch, BatchSegments, SegmentTable, StepResult
from kvlinker.engines.embedded.execution.compiled.bound_program import (
    BoundProgram,
    NativeStep,
    StepSight,
    address_of,
)
from kvlinker.engines.embedded.execution.forward_pass import ForwardPass
from kvlinker.engines.embedded.execution.late_layers import never_wait
from kvlinker.engines.embedded.execution.layers_ahead import LayersAhead
from kvlinker.engines.embedded.execution.observing import LayerAttention, Observation
from kvlinker.engines.embedded.kv_cache.pool import KVPool
from kvlinker.engines.embedded.model.anatomy import Anatomy
from kvlinker.engines.embedded.model.interception import intercepted
from kvlinker.engines.embedded.model.recording.program import (
    Product,
    Program,
    RecordedAttention,
)
from kvlinker.engines.embedded.model.rotary import Rotary

ROW_LIMIT = 256
"""The most tokens of a step that is computed so. Of longer ones Python's part is small."""

FIRST_ROWS = 16
"""The tokens that there is memory for at first."""


@cache
def step_function() -> native.Function:
    """Return ``kvlinker_step`` of step.cpp, compiled when first asked for. Raises
    NativeUnavailableError."""
    return native.functions("step.cpp", {"kvlinker_step": NativeStep})["kvlinker_step"]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A step as native code takes it, with the memory that it reads."""

    step: NativeStep
    positions: NDArray[np.int64]
    segments: BatchSegments
    held: tuple[object, ...]


class _Workspace:
    """Memory in which one pass at a time is computed: it grows with the tokens of a pass."""

    def __init__(self, bind: Callable[[int], BoundProgram], table: SegmentTable) -> None:
        """``bind`` allocates memory for a number of tokens."""
        self._bind = bind
        self.table = table
        self.bound = bind(FIRST_ROWS)

    def make_room(self, rows: int) -> BoundProgram:
        """Return memory for at least ``rows`` tokens."""
        if rows > self.bound.rows:
            self.bound = self._bind(1 << (rows - 1).bit_length())
        return self.bound


class CompiledStep:
    """Computes the steps of one pool, and beside them a pass that is computed some layers at a
    time. It is not thread safe: the engine's thread owns it."""

    def __init__(
        self,
        program: Program,
        anatomy: Anatomy,
        pool: KVPool,
        kernel: NativeAttention,
        ahead: LayersAhead,
        *,
        compute: native.Function | None = None,
    ) -> None:
        """``compute`` takes each ``NativeStep``, in place of step.cpp: for measurements of the
        rest."""
        self._program = program
        self._anatomy = anatomy
        self._layers = layers = anatomy.layers
        self._pool = pool
        self.kernel = kernel
        self._ahead = ahead
        self._compute = compute or step_function()
        self._write, self._attend = map(address_of, kernel.functions)
        rotaries = dict.fromkeys(layer.rotary for layer in layers if layer.rotary is not None)
        self._rotaries: list[Rotary] = list(rotaries)
        products = (each for each in program.operations if isinstance(each, Product))
        most = [each.weights.most_rows for each in products]
        self.most_rows = min(each for each in (*most, ROW_LIMIT) if each is not None)
        """The most tokens of a step."""

        self._needs_forward = bool(anatomy.recurrences) or any(layer.latents for layer in layers)
        self._whole, self._layered = (
            _Workspace(
                lambda rows: BoundProgram(program, layers, self._rotaries, pool, rows),
                SegmentTable(pool),
            )
            for _ in range(2)
        )

    @property
    def most_layered_rows(self) -> int:
        """The most tokens of a pass that is computed some layers at a time; 0 if none can be."""
        return 0 if self._needs_forward else self.most_rows

    def takes(self, batch: Batch) -> bool:
        """Return whether the batch is plain, and there are kernels for its number of tokens."""
        return len(batch.tokens) <= self.most_rows and batch.is_plain

    def accepts_layers(self, batch: Batch) -> bool:
        """Return whether ``begin`` takes the batch: native code computes it without asking for
        states or latents, and nobody observes it or captures its KV."""
        watched = batch.observed or batch.captured
        return not self._needs_forward and not watched and self.takes(batch)

    def begin(self, batch: Batch) -> LayeredPass:
        """Return a pass over a batch for which ``accepts_layers`` returns true; nothing of it is
        computed yet. It uses the memory of the pass before, which must not go on."""
        prepared = self._prepare(batch, self._layered, None)
        bound = self._layered.bound

        def compute(begin: int, end: int) -> None:
            self._run(bound, prepared.step, begin, end)

        def result() -> StepResult:
            owners = batch.logit_owners
            return StepResult(dict(zip(owners, bound.logits(len(owners)), strict=True)), {}, {})

        return LayeredPass(self._program, compute, result)

    def compute(self, batch: Batch) -> StepResult | None:
        """Compute all runs of a batch that it ``takes``; None, and nothing is computed, of
        others."""
        if not self.takes(batch):
            return None
        forward = self._forward(batch)
        prepared = self._prepare(batch, self._whole, forward)
        with nullcontext() if forward is None else intercepted(forward):
            if batch.observed or batch.captured:
                self._compute_watched(batch, prepared)
            else:
                self._run(self._whole.bound, prepared.step, 0, len(self._program.operations))
        owners = batch.logit_owners
        logits = self._whole.bound.logits(len(owners))
        states = {} if forward is None else forward.states()
        return StepResult(dict(zip(owners, logits, strict=True)), {}, states)

    def _prepare(
        self, batch: Batch, workspace: _Workspace, forward: ForwardPass | None
    ) -> _Prepared:
        """Lay out what native code reads to compute a batch in this workspace."""
        ids = np.ascontiguousarray(batch.tokens, np.int64)
        positions = np.ascontiguousarray(batch.positions, np.int64)
        slots = np.ascontiguousarray(batch.slots, np.int64)
        wanted = np.array(batch.logit_rows, np.int64)
        bound = workspace.make_room(len(ids))
        segments = (
            BatchSegments(batch, self._layers, self._pool, self.kernel, self._ahead)
            if forward is None
            else forward.segments
        )
        plans, numbers = segments.plans()
        sights, longest = (StepSight * len(plans))(), 0
        for number, plan in enumerate(plans):
            assert isinstance(plan, NativePlan), plan
            table = plan.table
            sights[number] = StepSight(
                table.views, table.visits, table.members, table.bundles, table.bundle_count
            )
            longest = max(longest, plan.farthest, plan.last)
        sight_of = np.array(numbers, np.int64)
        rotations = [Rotation.of(rotary, longest + 1) for rotary in self._rotaries]
        layers = workspace.table.of(segments.chunks, segments.spans)
        step = NativeStep(
            layers=ctypes.addressof(bound.layers),
            write=self._write,
            attend=self._attend,
            rows=len(ids),
            wanted=len(wanted),
            ids=ids.ctypes.data,
            positions=positions.ctypes.data,
            slots=slots.ctypes.data,
            wanted_rows=wanted.ctypes.data,
            rotations=(Rotation * len(rotations))(*rotations),
            segments=layers.ctypes.data,
            segment_count=layers.shape[1],
            sights=sights,
            sight_of=sight_of.ctypes.data,
            threads=torch.get_num_threads(),
        )
        held = (batch, ids, slots, wanted, plans, sight_of, rotations, layers)
        return _Prepared(step, positions, segments, held)

    def _compute_watched(self, batch: Batch, prepared: _Prepared) -> None:
        """Compute the step up to each attention in turn, which is then shown to observers, and the
        new KV to those that capture it."""
        observation = Observation(batch.observed, native=True)
        bound, positions, segments = self._whole.bound, prepared.positions, prepared.segments
        begin = 0
        for number, operation in enumerate(self._program.operations, start=1):
            if not isinstance(operation, RecordedAttention):
                continue
            self._run(bound, prepared.step, begin, number)
            begin, index = number, operation.layer
            if self._layers[index].source is None:
                batch.capture(self._pool.kept_by[index], bound.kv(operation))
            if batch.observed:
                layer = LayerAttention(
                    segments.plan(index)[0],
                    positions,
                    bound.query(operation)[:, : len(positions)],
                    segments.layer(index),
                    self._layers[index].rotary,
                    operation.options,
                    picked=None,
                )
                observation.show(index, layer)
        self._run(bound, prepared.step, begin, len(self._program.operations))

    def _run(self, bound: BoundProgram, step: NativeStep, begin: int, end: int) -> None:
        """Compute the operations [begin, end). Raises the error of a module."""
        step.operations = ctypes.addressof(bound.operations[begin]) if begin < end else None
        step.count = end - begin
        self._compute(step)
        bound.raise_error()

    def _forward(self, batch: Batch) -> ForwardPass | None:
        """Return what the modules that native code calls ask for states, or to attend to latents;
        None if none does."""
        if not self._needs_forward:
            return None
        return ForwardPass(
            self._anatomy,
            self._pool,
            batch,
            kernel=self.kernel,
            ahead=self._ahead,
            profile=None,
            wait=never_wait,
        )


class LayeredPass:
    """Computes a piece of a prompt some layers at a time, between steps of requests that decode.

    A piece of few tokens reads all KV before it for these few. A larger piece, of which a step
    computes only some layers, reads that KV once, and still delays the decoding requests no longer
    ("layered prefill"). The pass stops behind each layer's attention. The KV of its tokens is
    complete when it ends; until then its results lie in its own memory, and in slots that no other
    request reads or writes.
    """

    def __init__(
        self,
        program: Program,
        compute: Callable[[int, int], None],
        result: Callable[[], StepResult],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``compute`` takes the operations [begin, end); ``result`` is called behind the last."""
        self._ends = [
            number
            for number, operation in enumerate(program.operations, start=1)
            if isinstance(operation, RecordedAttention)
        ]
        self._ends.append(len(program.operations))
        self._compute = compute
        self._result = result
        self._clock = clock
        self._begin = 0
        self.seconds = 0.0
        """How long it has taken so far."""

    def compute_layers(self, until: float) -> StepResult | None:
        """Compute one part, and more as long as half of the next one should be done by ``until``,
        in seconds of the clock. Returns the result once all are computed, and None before."""
        begin = self._clock()
        while self._ends:
            end = self._ends.pop(0)
            self._compute(self._begin, end)
            self._begin = end
            now = self._clock()
            self.seconds += now - begin
            if now + (now - begin) / 2 > until and self._ends:
                return None
            begin = now
        return self._result()
