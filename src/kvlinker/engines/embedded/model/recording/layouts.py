"""The memory layouts of a recorded pass's tensors, for any number of tokens: found by comparing two
passes of different lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvlinker.engines.embedded.model.recording.program import HeadsPlace, Place
from kvlinker.engines.embedded.model.recording.trace import Trace, UnrecordableError, memory_of

PRECISIONS = {torch.bfloat16: False, torch.float32: True}
"""The precisions of numbers that operations compute with; whether they are wide."""


class Axis(NamedTuple):
    """A dimension of a tensor."""

    size: int
    """0 for that of the tokens."""

    stride: int

    @property
    def is_tokens(self) -> bool:
        return self.size == 0


@dataclass(frozen=True, slots=True)
class Memory:
    """The output of one operation: numbers of each token, token after token."""

    number: int
    row: int
    """The numbers of a token."""

    wanted: bool

    moved: Mapping[tuple[int, int], int] | None = None
    """The strides here of those that the tensor has in both passes, where it does not lie token
    after token in these."""

    def stride(self, strides: tuple[int, int]) -> int:
        """Return the stride here of that which a view of the memory has in both passes."""
        found = strides[0] if self.moved is None else self.moved.get(strides)
        if found is None or (self.moved is None and strides[0] != strides[1]):
            raise UnrecordableError("its tensors do not lie token after token")
        return found


@dataclass(frozen=True, slots=True)
class Layout:
    """Says where a tensor's numbers lie."""

    memory: Memory | Tensor
    offset: int
    axes: tuple[Axis, ...]
    wide: bool

    @property
    def wanted(self) -> bool:
        """True if its tokens are those whose logits are wanted."""
        return isinstance(self.memory, Memory) and self.memory.wanted

    @property
    def row(self) -> int:
        return self.memory.row if isinstance(self.memory, Memory) else 0

    @property
    def name(self) -> int | Tensor:
        return self.memory.number if isinstance(self.memory, Memory) else self.memory

    @property
    def place(self) -> Place:
        """Where the numbers of each token lie, if they are neighbours."""
        return Place(self.name, self.offset, self.row, 0, 1, self.wide)


class Layouts:
    """Reads layouts off two passes."""

    def __init__(self, one: Trace, other: Trace) -> None:
        self._tokens = one.tokens, other.tokens
        self._wanted = one.wanted, other.wanted
        self._memories: dict[int, Memory] = {}
        self.made: list[tuple[int, bool]] = []
        """The bytes of a row of each memory, and whether its rows are the wanted tokens."""

    def fresh(self, row: int, *, wanted: bool, wide: bool) -> Memory:
        """Return new memory."""
        memory = Memory(len(self.made), row, wanted)
        self.made.append((row * (4 if wide else 2), wanted))
        return memory

    def output(self, one: Tensor, other: Tensor) -> Layout:
        """Return the layout of what an operation computes: in new memory, or where it is changed in
        place."""
        if memory_of(one) in self._memories:
            return self.of(one, other)
        wide = self._precision(one)
        tokens = [
            index
            for index, sizes in enumerate(zip(one.shape, other.shape, strict=True))
            if sizes in (self._tokens, self._wanted)
        ]
        if len(tokens) != 1 or one.storage_offset():
            raise UnrecordableError(f"it has a tensor of shape {tuple(one.shape)}")
        (axis,) = tokens
        sizes = one.shape[axis], other.shape[axis]
        row = one.numel() // sizes[0]
        memory = self.fresh(row, wanted=sizes == self._wanted, wide=wide)
        if one.stride(axis) != row:
            memory = replace(memory, moved=_moved(one, other, axis, row))
        self._memories[memory_of(one)] = memory
        return self.of(one, other)

    def of(self, one: Tensor, other: Tensor) -> Layout:
        """Return the layout of a tensor that has been computed, or that is the same in all
        steps."""
        memory = self._memories.get(memory_of(one))
        if memory is None:
            return self._constant(one, other)
        if one.ndim != other.ndim or one.storage_offset() != other.storage_offset():
            raise UnrecordableError("its tensors lie otherwise for other numbers of tokens")
        if memory.moved is not None and one.storage_offset():
            raise UnrecordableError("its tensors do not lie token after token")
        axes = []
        for axis in range(one.ndim):
            sizes = one.shape[axis], other.shape[axis]
            strides = one.stride(axis), other.stride(axis)
            if sizes[0] == sizes[1]:
                axes.append(Axis(sizes[0], memory.stride(strides) if sizes[0] > 1 else 0))
            elif sizes == (self._wanted if memory.wanted else self._tokens):
                if memory.stride(strides) != memory.row:
                    raise UnrecordableError("its tensors do not lie token after token")
                axes.append(Axis(0, memory.row))
            else:
                raise UnrecordableError(f"it has a tensor of shape {tuple(one.shape)}")
        if sum(axis.is_tokens for axis in axes) != 1:
            raise UnrecordableError("tokens are mixed outside attention")
        return Layout(memory, int(one.storage_offset()), tuple(axes), self._precision(one))

    def _constant(self, one: Tensor, other: Tensor) -> Layout:
        if one.shape != other.shape or (
            one.data_ptr() != other.data_ptr() and not torch.equal(one, other)
        ):
            raise UnrecordableError("it computes with a tensor that depends on the tokens' number")
        if one.device.type != "cpu":
            raise UnrecordableError("its weights are not in the CPU's memory")
        if one.dtype not in PRECISIONS:
            one = one.float()
        axes = tuple(Axis(*each) for each in zip(one.shape, one.stride(), strict=True))
        return Layout(one, 0, axes, PRECISIONS[one.dtype])

    def _precision(self, tensor: Tensor) -> bool:
        if tensor.dtype not in PRECISIONS:
            raise UnrecordableError(f"it computes in {tensor.dtype}")
        return PRECISIONS[tensor.dtype]


def _moved(one: Tensor, other: Tensor, tokens: int, row: int) -> dict[tuple[int, int], int]:
    """Return the strides of a tensor's dimensions as they are where tokens come first, by those
    that it has in two passes."""
    found = {(one.stride(tokens), other.stride(tokens)): row}
    others = [axis for axis in range(one.ndim) if axis != tokens and one.shape[axis] > 1]
    inside = 1
    for axis in sorted(others, key=one.stride):
        found[one.stride(axis), other.stride(axis)] = inside
        inside *= one.shape[axis]
    if inside != row or len(found) != len(others) + 1:
        raise UnrecordableError("its tensors do not lie token after token")
    return found


def scalar(number: float) -> Layout:
    """Return a layout of one number."""
    return Layout(torch.tensor(float(number)), 0, (), True)


def go_together(output: Layout, inputs: Sequence[Layout]) -> tuple[int, int, list[Place]]:
    """Return how to go through the output and the inputs, which are broadcast, in two dimensions
    for each token: the number of parts of a token, the size of a part, and the places."""
    layouts = (output, *inputs)
    depth = len(output.axes)
    axes: list[tuple[int, list[int]]] = []
    for index in range(depth):
        size = output.axes[index].size
        found = [_aligned(layout, index, depth) for layout in layouts]
        if output.axes[index].is_tokens:
            for layout, axis in zip(layouts, found, strict=True):
                tokenless = isinstance(layout.memory, Tensor) and axis.size == 1
                if not (axis.is_tokens and layout.wanted == output.wanted) and not tokenless:
                    raise UnrecordableError("tokens are mixed outside attention")
        elif size > 1:
            if any(axis.size not in (1, size) for axis in found):
                raise UnrecordableError("tokens are mixed outside attention")
            axes.append((size, [axis.stride if axis.size == size else 0 for axis in found]))
    axes.sort(key=lambda axis: -axis[1][0])
    merged: list[tuple[int, list[int]]] = []
    for size, strides in axes:
        if merged and merged[-1][1] == [size * stride for stride in strides]:
            merged[-1] = merged[-1][0] * size, strides
        else:
            merged.append((size, strides))
    if len(merged) > 2 or (merged and merged[-1][1][0] != 1):
        raise UnrecordableError("an operation has too many dimensions")
    one = (1, [0] * len(layouts))
    if not merged:
        merged = [(1, [1] + [0] * len(inputs))]
    outer, inner = merged if len(merged) == 2 else (one, merged[0])
    if any(stride not in (0, 1) for stride in inner[1]):
        raise UnrecordableError("an operation reads numbers that are not neighbours")
    places = [
        Place(layout.name, layout.offset, layout.row, outer[1][at], inner[1][at], layout.wide)
        for at, layout in enumerate(layouts)
    ]
    return outer[0], inner[0], places


def _aligned(layout: Layout, index: int, depth: int) -> Axis:
    """Return the axis that is broadcast to axis ``index`` of an output of ``depth`` dimensions."""
    before = depth - len(layout.axes)
    return Axis(1, 0) if index < before else layout.axes[index - before]


def by_last_axis(layout: Layout) -> tuple[int, int, Place]:
    """Return how to go through the last dimension of everything before it: the number of parts of a
    token, the size of a part, and the place."""
    *before, last = layout.axes
    others = [axis for axis in before if axis.size > 1]
    if last.is_tokens or (last.size > 1 and last.stride != 1) or len(others) > 1:
        raise UnrecordableError("an operation reads numbers that are not neighbours")
    outer = others[0] if others else Axis(1, 0)
    place = Place(layout.name, layout.offset, layout.row, outer.stride, 1, layout.wide)
    return outer.size, last.size, place


def heads_place(layout: Layout, *, heads: int, tokens: int) -> HeadsPlace:
    """Return the place of a tensor of four dimensions whose heads and tokens are these ones."""
    dim, head = layout.axes[3], layout.axes[heads]
    fits = layout.axes[tokens].is_tokens and isinstance(layout.memory, Memory)
    if not fits or layout.wanted or layout.wide or (dim.size > 1 and dim.stride != 1):
        raise UnrecordableError("attention's inputs do not lie token after token in bf16")
    assert isinstance(layout.memory, Memory)
    row = layout.memory.row
    return HeadsPlace(layout.memory.number, layout.offset, head.size, dim.size, head.stride, row)
