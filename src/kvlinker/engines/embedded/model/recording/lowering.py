"""Makes a program of a model's pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvlinker.engines.embedded.model.anatomy import Anatomy
from kvlinker.engines.embedded.model.norms import NativeNorm
from kvlinker.engines.embedded.model.recording.layouts import (
    Layout,
    Layouts,
    Memory,
    by_last_axis,
    go_together,
    heads_place,
    scalar,
)
from kvlinker.engines.embedded.model.recording.program import (
    Buffer,
    Calculation,
    CodedRows,
    Kind,
    ModuleCall,
    Operation,
    Place,
    Product,
    Program,
    RecordedAttention,
    with_shared_buffers,
)
from kvlinker.engines.embedded.model.recording.trace import (
    ATTENTION,
    CALLED,
    EMBEDDING,
    EXPERTS,
    INPUT,
    LINEAR,
    NORM,
    Node,
    Trace,
    UnrecordableError,
    memory_of,
    trace_pass,
)
from kvlinker.engines.embedded.model.weights.coded import CodedWeight
from kvlinker.engines.embedded.model.weights.linears import (
    MatrixLinear,
    SharedLinear,
    multiplies_plain,
)
from kvlinker.engines.embedded.model.weights.matrices import NativeWeights
from kvlinker.engines.embedded.model.weights.native_quantized import GroupedMatrix
from kvlinker.engines.embedded.model.weights.tied_embedding import TiedEmbedding

LENGTHS = ((11, 5), (13, 7))
"""The tokens, and of them those whose logits are wanted, of the two passes that are recorded: sizes
that no model has."""

OF_ONE = {
    "silu": Kind.SILU,
    "relu": Kind.RELU,
    "tanh": Kind.TANH,
    "sigmoid": Kind.SIGMOID,
    "rsqrt": Kind.RSQRT,
    "neg": Kind.NEGATE,
    "to": Kind.COPY,
    "_to_copy": Kind.COPY,
    "clone": Kind.COPY,
    "type_as": Kind.COPY,
    "sqrt": Kind.ROOT,
}
OF_TWO = {"add": Kind.ADD, "sub": Kind.SUBTRACT, "mul": Kind.MULTIPLY, "div": Kind.DIVIDE}
POWERS = {2: Kind.SQUARE, 3: Kind.CUBE, 0.5: Kind.ROOT, -0.5: Kind.RSQRT}
GELUS = {"none": Kind.GELU, "tanh": Kind.GELU_TANH}


def record_program(model: Any, anatomy: Anatomy) -> Program:
    """Return the program of a loaded model's pass, whose weights are arranged.

    Raises UnrecordableError if it has operations that are not known.
    """
    one, other = (trace_pass(model, anatomy, *lengths) for lengths in LENGTHS)
    if [node.name for node in one.nodes] != [node.name for node in other.nodes]:
        raise UnrecordableError("it computes otherwise for other numbers of tokens")
    return _Lowering(one, other).program()


class _Lowering:
    """Turns pairs of nodes into operations."""

    def __init__(self, one: Trace, other: Trace) -> None:
        self._traces = one, other
        self._layouts = Layouts(one, other)
        self._operations: list[Operation] = []
        self._held: list[nn.Module] = []
        self._inputs: dict[int, str] = {}
        self._attended = 0
        self._embedded: list[int] = []
        self._lower: dict[str, Callable[[Node, Node], None]] = {
            INPUT: self._input,
            NORM: self._norm,
            LINEAR: self._linear,
            EXPERTS: self._module,
            CALLED: self._module,
            ATTENTION: self._attention,
            "aten.embedding.default": self._embedding,
            EMBEDDING: self._tied_embedding,
            "aten.index.Tensor": self._wanted_rows,
            "aten.layer_norm.default": self._layer_norm,
            "aten.mean.dim": self._mean,
            "aten.gelu.default": self._gelu,
            "aten.pow.Tensor_Scalar": self._power,
            "aten.cat.default": self._join,
            "aten.concatenate.default": self._join,
            "aten.reshape.default": self._reshape,
        }

    def program(self) -> Program:
        for one, other in zip(*(trace.nodes for trace in self._traces), strict=True):
            lower = self._lower.get(one.name) or self._of_numbers(one.name)
            lower(one, other)
        layout = self._layouts.of(*(trace.logits for trace in self._traces))
        if not layout.wanted or not isinstance(layout.memory, Memory) or layout.offset:
            raise UnrecordableError("its logits are not those of the wanted tokens")
        vocabulary = layout.axes[-1].size
        if layout.row != vocabulary:
            raise UnrecordableError("its logits are a part of what it computes")
        if any(ids < max(vocabulary, *self._embedded) for ids in self._embedded):
            raise UnrecordableError("its head and its embeddings differ in the tokens they know")
        buffers = [Buffer(*each) for each in self._layouts.made]
        number = layout.memory.number
        operations, shared, numbers = with_shared_buffers(self._operations, buffers, number)
        logits = Place(numbers[number], 0, vocabulary, 0, 1, layout.wide)
        return Program(operations, shared, logits, vocabulary, tuple(self._held))

    def _of_numbers(self, name: str) -> Callable[[Node, Node], None]:
        """Return what lowers an operation on each number by itself."""
        short = _short(name)
        if short in OF_ONE:
            kind = OF_ONE[short]
            return lambda one, other: self._map(kind, one, other, "self")
        if short in OF_TWO:
            return self._combine
        raise UnrecordableError(f"no native code computes {name}")

    def _layout(self, one: Node, other: Node, name: str) -> Layout:
        """Return the layout of an argument: a tensor, or a number."""
        first, second = one.arguments[name], other.arguments[name]
        if isinstance(first, Tensor):
            if (given := self._inputs.get(memory_of(first))) is not None:
                raise UnrecordableError(f"it computes with {given}")
            return self._layouts.of(first, second)
        if first != second or not isinstance(first, int | float):
            raise UnrecordableError("it computes with numbers that depend on the tokens' number")
        return scalar(first)

    def _output(self, one: Node, other: Node) -> Layout:
        return self._layouts.output(one.output, other.output)

    def _add(self, kind: Kind, output: Layout, *inputs: Layout) -> None:
        """Add an operation on each number by itself."""
        outer, inner, (into, one, *behind) = go_together(output, inputs)
        other = behind[0] if behind else None
        self._operations.append(Calculation(kind, output.wanted, outer, inner, into, one, other))

    def _map(self, kind: Kind, one: Node, other: Node, *names: str) -> None:
        inputs = [self._layout(one, other, name) for name in names]
        self._add(kind, self._output(one, other), *inputs)

    def _combine(self, one: Node, other: Node) -> None:
        _require(one, {"alpha": 1, "rounding_mode": None})
        self._map(OF_TWO[_short(one.name)], one, other, "self", "other")

    def _gelu(self, one: Node, other: Node) -> None:
        self._map(GELUS[one.arguments["approximate"]], one, other, "self")

    def _power(self, one: Node, other: Node) -> None:
        kind = POWERS.get(one.arguments["exponent"])
        if kind is None:
            raise UnrecordableError(
                f"no native code computes powers of {one.arguments['exponent']}"
            )
        self._map(kind, one, other, "self")

    def _join(self, one: Node, other: Node) -> None:
        output = self._output(one, other)
        axis = one.arguments["dim"] % len(output.axes)
        if output.axes[axis].is_tokens:
            raise UnrecordableError("tokens are mixed outside attention")
        offset = 0
        parts = zip(one.arguments["tensors"], other.arguments["tensors"], strict=True)
        for part in (self._layouts.of(*each) for each in parts):
            size = part.axes[axis].size
            axes = list(output.axes)
            axes[axis] = axes[axis]._replace(size=size)
            into = Layout(output.memory, offset, tuple(axes), output.wide)
            self._add(Kind.COPY, into, part)
            offset += size * output.axes[axis].stride

    def _reshape(self, one: Node, other: Node) -> None:
        """Add a copy of what could not be seen in another shape where it lies."""
        source = self._layout(one, other, "self")
        copied, others = (node.output.view(node.arguments["self"].shape) for node in (one, other))
        self._add(Kind.COPY, self._layouts.output(copied, others), source)

    def _input(self, one: Node, other: Node) -> None:
        self._inputs[memory_of(one.output)] = one.arguments["name"]

    def _embedding(self, one: Node, other: Node) -> None:
        if self._inputs.get(memory_of(one.arguments["indices"])) != "ids":
            raise UnrecordableError("it embeds other numbers than the tokens' ids")
        if isinstance(coded := one.arguments["weight"], CodedWeight):
            self._coded_embedding(coded.matrix, self._output(one, other))
            return
        weight = self._layout(one, other, "weight")
        if not isinstance(weight.memory, Tensor):
            raise UnrecordableError("it computes the table of its embeddings")
        self._embedded.append(len(weight.memory))
        self._gather(weight, self._output(one, other), by_tokens=True)

    def _tied_embedding(self, one: Node, other: Node) -> None:
        embedding, output = one.module, self._output(one, other)
        assert isinstance(embedding, TiedEmbedding), embedding
        if self._inputs.get(memory_of(one.arguments["input"])) != "ids":
            raise UnrecordableError("it embeds other numbers than the tokens' ids")
        width = embedding.embedding_dim
        if output.wide or output.row != width:
            raise UnrecordableError("rows are chosen that do not lie as they should")
        self._embedded.append(embedding.num_embeddings)
        self._operations.append(
            Calculation(
                Kind.GATHER_BLOCKS,
                output.wanted,
                1,
                width,
                output.place,
                Place(embedding.blocks, 0, 0, 0, 1, wide=False),
            )
        )
        self._held.append(embedding)

    def _coded_embedding(self, matrix: GroupedMatrix, output: Layout) -> None:
        if output.wide or output.row != matrix.inputs or output.wanted:
            raise UnrecordableError("rows are chosen that do not lie as they should")
        self._embedded.append(matrix.outputs)
        self._operations.append(CodedRows(output.place, matrix))

    def _wanted_rows(self, one: Node, other: Node) -> None:
        source, chosen = self._layout(one, other, "self"), one.arguments["indices"]
        is_by_row = (
            len(source.axes) == 3
            and source.axes[1].is_tokens
            and len(chosen) == 2
            and chosen[0] is None
            and self._inputs.get(memory_of(chosen[1])) == "rows"
        )
        if not is_by_row or source.wanted:
            raise UnrecordableError("it chooses among tokens")
        self._gather(source, self._output(one, other), by_tokens=False)

    def _gather(self, source: Layout, output: Layout, *, by_tokens: bool) -> None:
        last = source.axes[-1]
        row = source.row if isinstance(source.memory, Memory) else source.axes[0].stride
        if last.stride != 1 or source.wide != output.wide or output.row != last.size:
            raise UnrecordableError("rows are chosen that do not lie as they should")
        self._operations.append(
            Calculation(
                Kind.GATHER,
                output.wanted,
                1,
                last.size,
                output.place,
                source.place._replace(row=row),
                by_tokens=by_tokens,
            )
        )

    def _norm(self, one: Node, other: Node) -> None:
        assert one.module is not None
        norm: Any = one.module.forward
        assert isinstance(norm, NativeNorm), norm
        weight: Any = one.module.weight
        self._by_rows(
            Kind.RMS_NORM, one, other, "input", weight=weight, epsilon=norm.epsilon, form=norm.form
        )
        self._held.append(one.module)

    def _layer_norm(self, one: Node, other: Node) -> None:
        parts = {name: one.arguments[name] for name in ("weight", "bias")}
        if len(one.arguments["normalized_shape"]) != 1:
            raise UnrecordableError("a norm goes over several dimensions")
        self._by_rows(Kind.LAYER_NORM, one, other, "input", epsilon=one.arguments["eps"], **parts)

    def _mean(self, one: Node, other: Node) -> None:
        _require(one, {"keepdim": True})
        depth = one.arguments["self"].ndim
        if [axis % depth for axis in one.arguments["dim"]] != [depth - 1]:
            raise UnrecordableError("a mean goes over several dimensions")
        self._by_rows(Kind.MEAN, one, other, "self")

    def _by_rows(self, kind: Kind, one: Node, other: Node, name: str, **others: Any) -> None:
        """Add an operation on the last dimension of everything before it."""
        source, output = self._layout(one, other, name), self._output(one, other)
        outer, inner, place = by_last_axis(source)
        _, _, into = by_last_axis(output)
        for tensor in (others.get("weight"), others.get("bias")):
            fits = tensor is None or (tensor.dtype == torch.bfloat16 and tensor.is_contiguous())
            if not fits:
                raise UnrecordableError("the weights of its norms are not in bf16")
        if kind is Kind.RMS_NORM and (source.wide or output.wide):
            raise UnrecordableError("its norms are not in bf16")
        self._operations.append(
            Calculation(kind, output.wanted, outer, inner, into, place, **others)
        )

    def _linear(self, one: Node, other: Node) -> None:
        module, source = one.module, self._layout(one, other, "input")
        output = self._output(one, other)
        if source.wide or output.wide:
            raise UnrecordableError("its linear layers are not in bf16")
        assert module is not None
        weights, bias, compute = _weights(module)
        given, later = self._dense(source).place, None
        if weights is None:
            self._operations.append(ModuleCall(output.wanted, given, output.place, compute))
        else:
            if weights.rounds_before_bias:
                later, bias = bias, None
            self._operations.append(Product(output.wanted, given, output.place, weights, bias))
        if later is not None:
            added = self._layouts.of(later, later)
            self._add(Kind.ADD, output, output, added)
        self._held.append(module)

    def _module(self, one: Node, other: Node) -> None:
        source, output = self._layout(one, other, "input"), self._output(one, other)
        if source.wide or output.wide or output.row != output.axes[-1].size:
            raise UnrecordableError("what it calls does not lie token after token in bf16")
        assert one.compute is not None
        given = self._dense(source).place
        self._operations.append(ModuleCall(output.wanted, given, output.place, one.compute))

    def _dense(self, source: Layout) -> Layout:
        """Return the layout of the same numbers with nothing in between."""
        width = source.axes[-1].size
        if source.row == width:
            return source
        memory = self._layouts.fresh(width, wanted=source.wanted, wide=False)
        axes = [axis._replace(stride=width) if axis.is_tokens else axis for axis in source.axes]
        copied = Layout(memory, 0, tuple(axes), False)
        self._add(Kind.COPY, copied, source)
        return copied

    def _attention(self, one: Node, other: Node) -> None:
        query, key, value = (
            heads_place(self._layout(one, other, name), heads=1, tokens=2)
            for name in ("query", "key", "value")
        )
        output = heads_place(self._output(one, other), heads=2, tokens=1)
        assert one.options is not None
        self._operations.append(
            RecordedAttention(self._attended, query, key, value, output, one.options)
        )
        self._attended += 1


def _short(name: str) -> str:
    """Return an operation's name without its variants; one in place has the same."""
    return name.removeprefix("aten.").split(".")[0].removesuffix("_")


def _weights(
    module: nn.Module,
) -> tuple[NativeWeights | None, Tensor | None, Callable[[Tensor], Tensor]]:
    """Return what native code multiplies by in a linear layer's place, None where oneDNN is faster;
    the layer's bias; and what computes both."""
    if isinstance(module, SharedLinear):
        matrix, bias = module.shared.matrix, module.shared.bias
    elif isinstance(module, MatrixLinear):
        matrix, bias = module.matrix, module.bias
    else:
        assert isinstance(module, nn.Linear), module
        if not multiplies_plain(module):
            raise UnrecordableError("no native code multiplies by a plain weight that it has")
        outputs, width = module.weight.shape
        address = module.weight.data_ptr()
        return NativeWeights("plain", address, outputs, width, width, False), module.bias, module
    return matrix.native(), bias, partial(matrix.multiply, bias=bias)


def _require(node: Node, expected: Mapping[str, Any]) -> None:
    """Raises UnrecordableError if an argument is there that is not the expected one."""
    for name, value in expected.items():
        if node.arguments.get(name, value) != value:
            raise UnrecordableError(f"no native code computes {node.name} with {name}")
