"""The list of operations that a model's pass is, for any number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, NamedTuple

from torch import Tensor, nn

from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.embedded.model.norms import NormForm
from kvlinker.engines.embedded.model.weights.matrices import NativeWeights
from kvlinker.engines.embedded.model.weights.native_quantized import GroupedMatrix


class Kind(IntEnum):
    """The kind of an operation: ``Kind`` of step.cpp."""

    COPY = 0
    ADD = 1
    SUBTRACT = 2
    MULTIPLY = 3
    DIVIDE = 4
    SILU = 5
    GELU = 6
    GELU_TANH = 7
    RELU = 8
    TANH = 9
    SIGMOID = 10
    RSQRT = 11
    SQUARE = 12
    CUBE = 13
    NEGATE = 14
    MEAN = 15
    RMS_NORM = 16
    LAYER_NORM = 17
    GATHER = 18
    PRODUCT = 19
    ATTENTION = 20
    ROOT = 21
    GATHER_BLOCKS = 22
    GATHER_CODES = 23


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory in which each row of a step has ``row_bytes`` bytes."""

    row_bytes: int
    wanted: bool
    """True if its rows are the tokens whose logits are wanted; False: all tokens."""


class Place(NamedTuple):
    """Says where an operation's numbers lie: [rows, outer, inner]. Strides count numbers."""

    memory: int | Tensor
    """The number of a buffer; or a tensor that is the same in every step."""

    offset: int
    row: int
    outer: int
    inner: int
    wide: bool
    """True: fp32, False: bf16."""


class HeadsPlace(NamedTuple):
    """Says where the heads of all tokens lie, in bf16: [heads, rows, dim]."""

    memory: int
    offset: int
    heads: int
    dim: int
    head: int
    """The stride from head to head."""

    row: int


@dataclass(frozen=True, slots=True)
class Calculation:
    """An operation on the numbers of each row by themselves."""

    kind: Kind
    wanted: bool
    """True: it is done for the tokens whose logits are wanted; False: for all."""

    outer: int
    inner: int
    output: Place
    one: Place
    other: Place | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    epsilon: float = 0.0
    form: NormForm | None = None

    by_tokens: bool = False
    """For GATHER: rows are chosen by the tokens' ids; False: they are the wanted tokens'."""


@dataclass(frozen=True, slots=True)
class Product:
    """Rows times a matrix."""

    wanted: bool
    input: Place
    output: Place
    weights: NativeWeights
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class CodedRows:
    """The rows of a weight of a GGUF file that the tokens' ids choose: their embeddings."""

    output: Place
    matrix: GroupedMatrix


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A module of the model, or oneDNN's product with a weight, which computes all rows between
    operations of native code."""

    wanted: bool
    input: Place
    output: Place
    compute: Callable[[Tensor], Any]
    """Calls the module: [1, rows, width] -> the same, or a tuple that begins with it."""


@dataclass(frozen=True, slots=True)
class RecordedAttention:
    """Attention of the layer whose turn it is; its keys and values are written first."""

    layer: int
    query: HeadsPlace
    key: HeadsPlace
    value: HeadsPlace
    output: HeadsPlace
    options: AttentionOptions


Operation = Calculation | Product | CodedRows | ModuleCall | RecordedAttention


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """The operations of a pass, in order. It is immutable, and made once for a loaded model."""

    operations: tuple[Operation, ...]
    buffers: tuple[Buffer, ...]
    logits: Place
    """Where the logits of the wanted tokens lie: [rows, vocabulary]."""

    vocabulary: int
    held: tuple[nn.Module, ...]
    """The modules whose weights native code reads."""


def _places(operation: Operation) -> dict[str, Place | HeadsPlace]:
    """Return where an operation's numbers lie, by the names of its fields."""
    values = ((field.name, getattr(operation, field.name)) for field in fields(operation))
    return {name: value for name, value in values if isinstance(value, Place | HeadsPlace)}


def _moved(operation: Operation, numbers: Mapping[int, int]) -> Operation:
    """Return the operation where buffers have other numbers."""
    places = {
        name: place._replace(memory=numbers[place.memory])
        for name, place in _places(operation).items()
        if isinstance(place.memory, int)
    }
    return replace(operation, **places)  # type: ignore[arg-type]


def with_shared_buffers(
    operations: list[Operation], buffers: list[Buffer], logits: int
) -> tuple[tuple[Operation, ...], tuple[Buffer, ...], dict[int, int]]:
    """Return the operations with as few buffers as hold what is still needed at each time, and the
    new number of each buffer."""
    last: dict[int, int] = {logits: len(operations)}
    for index, operation in enumerate(operations):
        for place in _places(operation).values():
            if isinstance(place.memory, int):
                last[place.memory] = max(last.get(place.memory, 0), index)
    numbers: dict[int, int] = {}
    made: list[Buffer] = []
    free: list[int] = []
    for index, operation in enumerate(operations):
        for place in _places(operation).values():
            memory = place.memory
            if isinstance(memory, Tensor) or memory in numbers:
                continue
            buffer = buffers[memory]
            fitting = [each for each in free if made[each].wanted == buffer.wanted]
            if fitting:
                chosen = min(fitting, key=lambda each: abs(made[each].row_bytes - buffer.row_bytes))
                free.remove(chosen)
                most = max(made[chosen].row_bytes, buffer.row_bytes)
                made[chosen] = Buffer(most, buffer.wanted)
            else:
                chosen = len(made)
                made.append(buffer)
            numbers[memory] = chosen
        free += [numbers[each] for each in _ending(operation, last, index)]
    return tuple(_moved(each, numbers) for each in operations), tuple(made), numbers


def _ending(operation: Operation, last: dict[int, int], index: int) -> set[int]:
    """Return the buffers that no operation after this one needs."""
    memories = (place.memory for place in _places(operation).values())
    return {each for each in memories if isinstance(each, int) and last[each] == index}
