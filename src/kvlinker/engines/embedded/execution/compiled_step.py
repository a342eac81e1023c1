"""Computes steps by the program of a model's pass: in native code, without the model's modules."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines import native
from kvlinker.engines.embedded.attention.native_call import (
    Heads,
    NativeCall,
    Rotation,
    Write,
    heads,
)
from kvlinker.engines.embedded.attention.native_kernel import NativeAttention, NativePlan
from kvlinker.engines.embedded.execution.batch import Batch, StepResult
from kvlinker.engines.embedded.execution.forward_pass import ForwardPass
from kvlinker.engines.embedded.execution.late_layers import never_wait
from kvlinker.engines.embedded.execution.layers_ahead import LayersAhead
from kvlinker.engines.embedded.execution.observing import LayerAttention, Observation
from kvlinker.engines.embedded.execution.segments import BatchSegments, SegmentTable
from kvlinker.engines.embedded.execution.step_structures import (
    NativeStep,
    StepAttention,
    StepOperand,
    StepOperation,
    StepSight,
)
from kvlinker.engines.embedded.kv_cache.pool import KVPool
from kvlinker.engines.embedded.model.anatomy import Anatomy, LayerShape, kept_by
from kvlinker.engines.embedded.model.interception import intercepted
from kvlinker.engines.embedded.model.norms import NormForm
from kvlinker.engines.embedded.model.recording.module_calls import BoundModule, CallRows
from kvlinker.engines.embedded.model.recording.program import (
    Calculation,
    HeadsPlace,
    Kind,
    ModuleCall,
    Place,
    Product,
    Program,
    RecordedAttention,
)
from kvlinker.engines.embedded.model.rotary import Rotary
from kvlinker.engines.embedded.model.weights.native_products import Form, native_products
from kvlinker.engines.embedded.model.weights.native_products import Product as NativeProduct

MOST_ROWS = 256
"""The most tokens of a step that is computed so. Of longer ones Python's part is small."""

FEWEST_ROWS = 16
"""The tokens that there is memory for at first."""


@cache
def step_function() -> native.Function:
    """Return ``kvlinker_step`` of step.cpp, compiled when first asked for. Raises
    NativeUnavailableError."""
    return native.functions("step.cpp", {"kvlinker_step": NativeStep})["kvlinker_step"]


class CompiledStep:
    """Computes the steps of one pool. It is not thread safe: the engine's thread owns it."""

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
        """``compute`` takes each ``NativeStep``, in place of step.cpp: for who measures the
        rest."""
        self._program = program
        self._anatomy = anatomy
        self._layers = layers = anatomy.layers
        self._pool = pool
        self.kernel = kernel
        self._ahead = ahead
        self._compute = compute or step_function()
        self._table = SegmentTable(layers, pool)
        rotaries = dict.fromkeys(layer.rotary for layer in layers if layer.rotary is not None)
        self._rotaries: list[Rotary] = list(rotaries)
        products = (each for each in program.operations if isinstance(each, Product))
        most = [each.weights.most_rows for each in products]
        self._most_rows = min((each for each in most if each is not None), default=MOST_ROWS)
        self._bound = _Bound(program, layers, self._rotaries, pool, FEWEST_ROWS)

    def takes(self, batch: Batch) -> bool:
        """Return whether the batch is plain, and there are kernels for so many tokens."""
        tokens = sum(len(run.tokens) for run in batch.runs)
        return tokens <= min(self._most_rows, MOST_ROWS) and batch.is_plain

    def compute(self, batch: Batch) -> StepResult | None:
        """Compute all runs of a batch that it ``takes``; None, and nothing is computed, of
        others."""
        if not self.takes(batch):
            return None
        ids, positions, slots = (
            np.ascontiguousarray(each, np.int64)
            for each in (batch.tokens, batch.positions, batch.slots)
        )
        wanted = np.array(batch.logit_rows, np.int64)
        if len(ids) > self._bound.rows:
            rows = 1 << (len(ids) - 1).bit_length()
            self._bound = _Bound(self._program, self._layers, self._rotaries, self._pool, rows)
        forward = self._forward(batch)
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
        layers = self._table.of(segments.chunks, segments.spans)
        write, attend = self.kernel.functions
        step = NativeStep(
            operations=ctypes.addressof(self._bound.operations),
            count=len(self._bound.operations),
            layers=ctypes.addressof(self._bound.layers),
            write=_address(write),
            attend=_address(attend),
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
        with nullcontext() if forward is None else intercepted(forward):
            if batch.is_observed:
                self._compute_observed(step, batch, positions, segments)
            else:
                self._run(step)
        owners = batch.logit_owners
        logits = self._bound.logits(len(owners))
        states = {} if forward is None else forward.states()
        return StepResult(dict(zip(owners, logits, strict=True)), {}, states)

    def _compute_observed(
        self,
        step: NativeStep,
        batch: Batch,
        positions: NDArray[np.int64],
        segments: BatchSegments,
    ) -> None:
        """Compute the step up to each attention in turn, which is then shown to observers."""
        observation = Observation(batch, native=True)
        begin = 0
        for number, operation in enumerate(self._program.operations, start=1):
            if isinstance(operation, RecordedAttention):
                self._run(self._bound.part(step, begin, number))
                begin, index = number, operation.layer
                layer = LayerAttention(
                    segments.plan(index)[0],
                    positions,
                    self._bound.query(operation)[:, : len(positions)],
                    segments.layer(index),
                    self._layers[index].rotary,
                    operation.options,
                    picked=None,
                )
                observation.show(index, layer)
        self._run(self._bound.part(step, begin, len(self._program.operations)))

    def _run(self, step: NativeStep) -> None:
        """Compute these operations. Raises what a module raised."""
        self._compute(step)
        self._bound.raise_what_failed()

    def _forward(self, batch: Batch) -> ForwardPass | None:
        """Return what the modules that native code calls ask for states, or to attend to latents;
        None if none does."""
        if not self._anatomy.recurrences and not any(layer.latents for layer in self._layers):
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


class _Bound:
    """A program with the memory for so many rows, as step.cpp takes it."""

    def __init__(
        self,
        program: Program,
        layers: Sequence[LayerShape],
        rotaries: Sequence[Rotary],
        pool: KVPool,
        rows: int,
    ) -> None:
        self.rows = rows
        self._program = program
        self._shapes = layers
        self._kept_by = kept_by(layers)
        self._rotaries = rotaries
        self._pool = pool
        self._memory = [
            torch.empty(rows * buffer.row_bytes, dtype=torch.uint8) for buffer in program.buffers
        ]
        self._held: list[Any] = []
        self._failed: list[BaseException] = []
        self.layers = (StepAttention * len(layers))()
        self.operations = (StepOperation * len(program.operations))()
        for index, operation in enumerate(program.operations):
            if isinstance(operation, Calculation):
                self.operations[index] = self._calculation(operation)
            elif isinstance(operation, Product):
                self.operations[index] = self._product(operation)
            elif isinstance(operation, ModuleCall):
                self.operations[index] = self._module_call(operation)
            else:
                self.operations[index] = StepOperation(kind=Kind.ATTENTION, layer=operation.layer)
                self.layers[operation.layer] = self._attention(operation)

    def logits(self, rows: int) -> Tensor:
        """Return the logits of so many rows, in fp32: [rows, vocabulary]."""
        place = self._program.logits
        assert isinstance(place.memory, int), place
        dtype = torch.float32 if place.wide else torch.bfloat16
        memory = self._memory[place.memory].view(dtype)[: rows * place.row]
        return memory.view(rows, place.row).to(torch.float32, copy=True)

    def part(self, step: NativeStep, begin: int, end: int) -> NativeStep:
        """Have a step compute the operations [begin, end) only, and return it."""
        step.operations = ctypes.addressof(self.operations[begin]) if begin < end else None
        step.count = end - begin
        return step

    def query(self, attention: RecordedAttention) -> Tensor:
        """Return the queries of all rows, which lie there until the next operation: [heads, rows,
        key_dim]."""
        place = attention.query
        numbers = self._memory[place.memory].view(torch.bfloat16)
        shape = place.heads, self.rows, place.dim
        return numbers.as_strided(shape, (place.head, place.row, 1), place.offset)

    def _product(self, product: Product) -> StepOperation:
        weights = product.weights
        argument = NativeProduct(
            inputs=self._at(product.input),
            width=weights.width,
            weights=weights.address,
            outputs=weights.outputs,
            group=weights.group,
            bias=None if product.bias is None else self._held_at(product.bias),
            output=self._at(product.output),
        )
        self._held.append(argument)
        begin = ctypes.addressof(argument)
        return StepOperation(
            kind=Kind.PRODUCT,
            behind_gather=product.wanted,
            function=_address(_product_function(weights.form)),
            argument=begin,
            argument_rows=begin + NativeProduct.rows.offset,
            argument_threads=begin + NativeProduct.threads.offset,
        )

    def _module_call(self, call: ModuleCall) -> StepOperation:
        inputs, outputs = (self._rows_at(place) for place in (call.input, call.output))
        module = BoundModule(call.compute, inputs, outputs, self._failed)
        self._held.append(module)
        begin = ctypes.addressof(module.rows)
        return StepOperation(
            kind=Kind.PRODUCT,
            behind_gather=call.wanted,
            function=ctypes.cast(module.function, ctypes.c_void_p).value,
            argument=begin,
            argument_rows=begin + CallRows.rows.offset,
            argument_threads=begin + CallRows.threads.offset,
        )

    def raise_what_failed(self) -> None:
        """Raise what a module raised in the operations before, if one did."""
        if self._failed:
            error, *_ = self._failed
            self._failed.clear()
            raise error

    def _rows_at(self, place: Place) -> Tensor:
        """Return the numbers of all rows at a place in bf16 that has whole rows: [rows, row]."""
        assert isinstance(place.memory, int), place
        numbers = self._memory[place.memory].view(torch.bfloat16)
        return numbers[: self.rows * place.row].view(self.rows, place.row)

    def _calculation(self, calculation: Calculation) -> StepOperation:
        operands = {
            name: StepOperand(self._at(place), place.row, place.outer, place.inner, place.wide)
            for name, place in (
                ("one", calculation.one),
                ("other", calculation.other),
                ("output", calculation.output),
            )
            if place is not None
        }
        form = calculation.form or NormForm(0.0, False)
        return StepOperation(
            kind=calculation.kind,
            behind_gather=calculation.wanted,
            outer=calculation.outer,
            inner=calculation.inner,
            weight=None if calculation.weight is None else self._held_at(calculation.weight),
            bias=None if calculation.bias is None else self._held_at(calculation.bias),
            epsilon=calculation.epsilon,
            offset=form.offset,
            rounds_first=form.rounds_first,
            by_tokens=calculation.by_tokens,
            **operands,
        )

    def _attention(self, attention: RecordedAttention) -> StepAttention:
        shape, kept = self._shapes[attention.layer], self._kept_by[attention.layer]
        options = attention.options
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        return StepAttention(
            write=Write(
                key=self._heads(attention.key),
                value=self._heads(attention.value),
                pool_key=Heads(*heads(self._pool.keys[kept])),
                pool_value=Heads(*heads(self._pool.values[kept])),
            ),
            call=NativeCall(
                query=self._heads(attention.query),
                output=self._heads(attention.output),
                sinks=None if sinks is None else self._held_at(sinks),
                scale=options.scale,
                softcap=options.softcap or 0.0,
                window=options.window or 0,
            ),
            writes=shape.source is None,
            rotary=-1 if shape.rotary is None else self._rotaries.index(shape.rotary),
        )

    def _heads(self, place: HeadsPlace) -> Heads:
        begin = self._memory[place.memory].data_ptr()
        at = begin + place.offset * torch.bfloat16.itemsize
        return Heads(at, place.heads, 0, place.dim, place.head, place.row)

    def _at(self, place: Place) -> int:
        """Return the address of a place."""
        offset = place.offset * (4 if place.wide else 2)
        if isinstance(place.memory, Tensor):
            return self._held_at(place.memory) + offset
        return self._memory[place.memory].data_ptr() + offset

    def _held_at(self, tensor: Tensor) -> int:
        """Return the address of a tensor, which is held."""
        self._held.append(tensor)
        return tensor.data_ptr()


def _product_function(form: Form) -> native.Function:
    products = native_products()
    assert products is not None, "weights were packed for a processor with native code"
    return products.function(form)


def _address(function: native.Function) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
