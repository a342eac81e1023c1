"""Binds a program to the addresses of its weights, and of the memory for the tokens of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlinker.engines import native
from kvlinker.engines.embedded.attention.native_kernel import (
    Heads,
    NativeCall,
    Rotation,
    Write,
    heads,
)
from kvlinker.engines.embedded.kv_cache.pool import KVPool
from kvlinker.engines.embedded.model.anatomy import LayerShape
from kvlinker.engines.embedded.model.norms import NormForm
from kvlinker.engines.embedded.model.recording.program import (
    Calculation,
    CodedRows,
    HeadsPlace,
    Kind,
    ModuleCall,
    Place,
    Product,
    Program,
    RecordedAttention,
)
from kvlinker.engines.embedded.model.rotary import Rotary
from kvlinker.engines.embedded.model.weights.native_products import (
    Form,
    WeightRows,
    grouped_products,
    products_of,
)
from kvlinker.engines.embedded.model.weights.native_products import Product as NativeProduct
from kvlinker.store.chunk_kv import LayerKV


class StepOperand(ctypes.Structure):
    """Numbers of each token: ``Operand`` of step.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("token", ctypes.c_int64),
        ("outer", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("wide", ctypes.c_int64),
    )


class StepOperation(ctypes.Structure):
    """``Operation`` of step.cpp."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("behind_gather", ctypes.c_int64),
        ("outer", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("one", StepOperand),
        ("other", StepOperand),
        ("output", StepOperand),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        ("offset", ctypes.c_float),
        ("rounds_first", ctypes.c_int64),
        ("by_tokens", ctypes.c_int64),
        ("function", ctypes.c_void_p),
        ("argument", ctypes.c_void_p),
        ("argument_rows", ctypes.c_void_p),
        ("argument_threads", ctypes.c_void_p),
        ("argument_ids", ctypes.c_void_p),
        ("layer", ctypes.c_int64),
    )


class StepAttention(ctypes.Structure):
    """One layer's attention: ``Attention`` of step.cpp."""

    _fields_ = (
        ("write", Write),
        ("call", NativeCall),
        ("writes", ctypes.c_int64),
        ("rotary", ctypes.c_int64),
    )


class StepSight(ctypes.Structure):
    """The views of all queries in some layers: ``Sight`` of step.cpp."""

    _fields_ = (
        ("views", ctypes.c_void_p),
        ("visits", ctypes.c_void_p),
        ("members", ctypes.c_void_p),
        ("bundles", ctypes.c_void_p),
        ("bundle_count", ctypes.c_int64),
    )


class NativeStep(ctypes.Structure):
    """One step, or a part of its operations: ``Step`` of step.cpp."""

    _fields_ = (
        ("operations", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("layers", ctypes.c_void_p),
        ("write", ctypes.c_void_p),
        ("attend", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("wanted", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("wanted_rows", ctypes.c_void_p),
        ("rotations", ctypes.POINTER(Rotation)),
        ("segments", ctypes.c_void_p),
        ("segment_count", ctypes.c_int64),
        ("sights", ctypes.POINTER(StepSight)),
        ("sight_of", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )


CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class BoundProgram:
    """A program with memory for up to ``rows`` rows, in the form of step.cpp."""

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
        self._kept_by = pool.kept_by
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
            elif isinstance(operation, CodedRows):
                self.operations[index] = self._coded_rows(operation)
            elif isinstance(operation, ModuleCall):
                self.operations[index] = self._module_call(operation)
            else:
                self.operations[index] = StepOperation(kind=Kind.ATTENTION, layer=operation.layer)
                self.layers[operation.layer] = self._attention(operation)

    def logits(self, rows: int) -> Tensor:
        """Return the logits of the first ``rows`` rows, in fp32: [rows, vocabulary]."""
        place = self._program.logits
        assert isinstance(place.memory, int), place
        dtype = torch.float32 if place.wide else torch.bfloat16
        memory = self._memory[place.memory].view(dtype)[: rows * place.row]
        return memory.view(rows, place.row).to(torch.float32, copy=True)

    def query(self, attention: RecordedAttention) -> Tensor:
        """Return the queries of all rows, which lie there until the next operation: [heads, rows,
        key_dim]."""
        return self._numbers(attention.query)

    def kv(self, attention: RecordedAttention) -> LayerKV:
        """Return the keys, un-rotated, and values of all rows, which lie there until the next
        operation: [heads, rows, key_dim or value_dim]."""
        return LayerKV(self._numbers(attention.key), self._numbers(attention.value))

    def _numbers(self, place: HeadsPlace) -> Tensor:
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
            function=address_of(_product_function(weights.form)),
            argument=begin,
            argument_rows=begin + NativeProduct.rows.offset,
            argument_threads=begin + NativeProduct.threads.offset,
        )

    def _coded_rows(self, rows: CodedRows) -> StepOperation:
        matrix, products = rows.matrix, grouped_products()
        assert products is not None, "weights were read for a processor with native code"
        argument = WeightRows(
            width=matrix.inputs,
            weights=matrix.blocks.data_ptr(),
            group=matrix.group,
            output=self._at(rows.output),
        )
        self._held += [argument, matrix]
        begin = ctypes.addressof(argument)
        return StepOperation(
            kind=Kind.GATHER_CODES,
            function=address_of(products.rows_function(matrix.form)),
            argument=begin,
            argument_rows=begin + WeightRows.rows.offset,
            argument_threads=begin + WeightRows.threads.offset,
            argument_ids=begin + WeightRows.chosen.offset,
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

    def raise_error(self) -> None:
        """Raise the first error of a module in the operations before, if there is one."""
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
    return products_of(form).function(form)


def address_of(function: native.Function) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]


class CallRows(ctypes.Structure):
    """The arguments that step.cpp fills in before it calls a function."""

    _fields_ = (("rows", ctypes.c_int64), ("threads", ctypes.c_int64))


class BoundModule:
    """A module with the memory that it computes from and to, as a function for native code."""

    def __init__(
        self,
        compute: Callable[[Tensor], Any],
        inputs: Tensor,
        outputs: Tensor,
        failed: list[BaseException],
    ) -> None:
        """``compute`` calls the module. ``inputs`` and ``outputs`` are [rows, width], for as many
        rows as a step may have; what goes wrong is added to ``failed``, for native code cannot
        raise."""
        self._call = compute
        self._inputs = inputs
        self._outputs = outputs
        self._failed = failed
        self.rows = CallRows()
        self.function = CALLBACK(self._compute)

    def _compute(self, _: int | None) -> None:
        if self._failed:
            return
        try:
            rows = self.rows.rows
            with torch.inference_mode():
                output = self._call(self._inputs[None, :rows])
                first = output[0] if isinstance(output, tuple) else output
                self._outputs[:rows] = first.view(rows, -1)
        except BaseException as error:
            self._failed.append(error)
