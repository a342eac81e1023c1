"""Computes the layers that keep a state, in one forward pass over a batch: each sequence's tokens
behind its own state, and behind what the chunks before them do to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from kvlinker.engines.embedded.execution.batch import Batch, Run, SharedChunk, VisibleKV
from kvlinker.engines.embedded.execution.capturing import Capture
from kvlinker.engines.embedded.kv_cache.states import LayerState, SequenceState
from kvlinker.engines.embedded.model.anatomy import Anatomy
from kvlinker.engines.embedded.model.delta_step import DeltaStep, delta_step
from kvlinker.engines.embedded.model.recurrence import (
    ConvolutionCall,
    Effect,
    Gates,
    Recurrence,
    RuleCall,
)
from kvlinker.store.chunk_kv import ChunkState
from kvlinker.store.loading.arriving import KV


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens of the batch, from the position ``start`` on."""

    run: Run
    rows: slice
    start: int

    def divided(self, marks: Sequence[int]) -> Iterator[NewTokens]:
        """Yield its parts between the marks inside of it."""
        edges = [self.start, *(mark for mark in marks if self.start < mark < self.end), self.end]
        for begin, end in pairwise(edges):
            first = self.rows.start - self.start
            yield NewTokens(self.run, slice(first + begin, first + end), begin)

    @property
    def end(self) -> int:
        """The position behind the last of them."""
        return self.start + int(self.rows.stop - self.rows.start)


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Tokens of a chunk, as many as there are ``gates``, which it keeps one by one: rows of what
    enters the convolution, and of the gates, at its edges or inside."""

    kv: KV
    mixed: slice
    gates: slice
    inner: bool


@dataclass(frozen=True, slots=True)
class MappedTokens:
    """The inner tokens of a chunk, of which it keeps what they do together."""

    kv: KV


@dataclass(frozen=True, slots=True)
class Mark:
    """A place between tokens, where the state is wanted."""

    position: int


Tokens = NewTokens | KeptTokens
Stretch = list[Tokens] | MappedTokens | Mark
"""What stands in a sequence side by side: tokens one by one, or a map."""


@dataclass(slots=True)
class _Course:
    """What one sequence goes through in a step, in order."""

    stretches: list[Stretch]
    before: SequenceState | None
    end: int
    """The position behind the last token."""

    layers: dict[int, list[LayerState]] = field(default_factory=lambda: defaultdict(list))
    """The states at each mark, and behind the last token, of the layers that were computed."""

    @property
    def only(self) -> NewTokens | None:
        """All that it goes through, where that is one run; None otherwise."""
        stretch, *others = self.stretches
        if others or not isinstance(stretch, list) or len(stretch) > 1:
            return None
        return stretch[0] if isinstance(stretch[0], NewTokens) else None


class RecurrentPass:
    """Replaces the convolution and the rule of the layers that keep a state, layer by layer."""

    def __init__(self, anatomy: Anatomy, *, native: bool) -> None:
        self._native = native
        self._recurrences = anatomy.recurrences
        self._window = anatomy.window
        self._courses: dict[object, _Course] = {}
        self._layer = 0
        self._convolution: ConvolutionCall | None = None

    def enter(self, batch: Batch) -> None:
        """Compute the tokens of ``batch`` from now on: those of the batch before, or what is left
        of them."""
        if not self._recurrences:
            return
        rows = defaultdict[object, list[NewTokens]](list)
        for run, part in batch.rows():
            rows[run.owner].append(NewTokens(run, part, run.start))
        found = {
            owner: _course(new, batch.visible_kv[owner], self._window)
            for owner, new in rows.items()
        }
        for owner, course in found.items():
            if owner in self._courses:
                course.layers = self._courses[owner].layers
        self._courses = found

    def states(self) -> dict[object, tuple[SequenceState, ...]]:
        """Return the states of all sequences at their marks, ascending, and behind this step, once
        all layers are computed; none at marks that stand among tokens that a policy dropped."""
        return {
            owner: tuple(
                SequenceState(position, tuple(layers))
                for position, layers in sorted(course.layers.items())
                if len(layers) == len(self._recurrences)
            )
            for owner, course in self._courses.items()
        }

    def convolve(self, call: ConvolutionCall) -> Tensor:
        """Note what is to be convolved, which is done with the rule: the model only takes it apart
        in between."""
        self._convolution = call
        return call.hidden

    def recur(self, call: RuleCall) -> tuple[Tensor, None]:
        """Return the rule's output [1, tokens, heads, dim]."""
        convolution = self._convolution
        assert convolution is not None, "a rule follows its convolution"
        layer = _Layer(self._recurrences[self._layer], self._layer, convolution, call)
        step = delta_step(call, layer.state_shape, call.gates[0].device) if self._native else None
        for courses in self._alike():
            if step is None or not layer.step(courses, step):
                layer.advance(courses)
        self._layer += 1
        return layer.output(), None

    def _alike(self) -> Iterator[list[_Course]]:
        """Yield the sequences that are computed together: those with a single run of the same
        length, and any other alone."""
        groups = defaultdict[object, list[_Course]](list)
        for owner, course in self._courses.items():
            only = course.only
            groups[owner if only is None else _length(only)].append(course)
        yield from groups.values()


class _Layer:
    """One layer, in one forward pass."""

    def __init__(
        self, recurrence: Recurrence, number: int, convolution: ConvolutionCall, call: RuleCall
    ) -> None:
        self._recurrence = recurrence
        self._number = number
        self._convolution = convolution
        self._call = call
        self._entering = convolution.hidden[0]
        self._gates = tuple(gate[0] for gate in call.gates)
        self._output: Tensor | None = None

    def output(self) -> Tensor:
        """Return the output of all tokens of the batch: [1, tokens, heads, dim]."""
        assert self._output is not None, "a batch has tokens"
        return self._output[None]

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of a state: [heads, rows, columns]."""
        return self._recurrence.state_shape

    def step(self, courses: Sequence[_Course], step: DeltaStep) -> bool:
        """Compute sequences of which each has one token; False, and nothing done, for others."""
        rows: list[int] = []
        for course in courses:
            tokens = course.only
            if tokens is None or _length(tokens) > 1 or tokens.run.capture:
                return False
            rows.append(tokens.rows.start)
        states = [self._state(course) for course in courses]
        before = torch.stack([state.before for state in states])
        entering = self._entering[:, rows].T[..., None]
        mixed = self._recurrence.mixed(self._convolution.apply(before, entering))
        gates = tuple(gate[rows][:, None] for gate in self._gates)
        output, after = step(mixed, gates, [state.state for state in states])
        for row, each in zip(rows, output, strict=True):
            self._put(slice(row, row + 1), each)
        contexts = torch.cat([before, entering], -1)[..., 1:]
        for course, context, last in zip(courses, contexts, after, strict=True):
            course.layers[course.end].append(LayerState(context, last))
        return True

    def advance(self, courses: Sequence[_Course]) -> None:
        """Compute sequences whose stretches are alike."""
        states = [self._state(course) for course in courses]
        before = torch.stack([state.before for state in states])
        state = torch.stack([state.state for state in states])
        for stretches in zip(*(course.stretches for course in courses), strict=True):
            if isinstance(stretches[0], Mark):
                courses[0].layers[stretches[0].position].append(LayerState(before[0], state[0]))
            elif isinstance(stretches[0], MappedTokens):
                before, state = self._mapped(stretches[0].kv.states[self._number], state)
            else:
                before, state = self._computed(stretches, before, state)
        for course, context, last in zip(courses, before, state, strict=True):
            course.layers[course.end].append(LayerState(context, last))

    def _state(self, course: _Course) -> LayerState:
        """Return a sequence's state before this step."""
        if course.before is not None:
            return course.before.layers[self._number]
        shape = self._recurrence
        return LayerState(
            self._entering.new_zeros(shape.channels, shape.window),
            self._entering.new_zeros(shape.state_shape, dtype=torch.float32),
        )

    def _mapped(self, kept: ChunkState, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the context [1, channels, window] and the state behind a map."""
        assert kept.effect is not None
        context = kept.mixed[kept.first : -1].to(self._entering).T
        return context[None], self._recurrence.applied(Effect(*kept.effect), state)

    def _computed(
        self, stretches: Sequence[list[Tokens]], before: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return context and state behind tokens, and keep the output of those of the batch."""
        inputs = [self._inputs(stretch) for stretch in stretches]
        entering = torch.stack([found for found, _ in inputs])
        gates = tuple(
            torch.stack(each) for each in zip(*(found for _, found in inputs), strict=True)
        )
        mixed = self._recurrence.mixed(self._convolution.apply(before, entering))
        output, last = self._call.scan(mixed, gates, state)
        for index, stretch in enumerate(stretches):
            begin = 0
            for tokens in stretch:
                end = begin + _length(tokens)
                if isinstance(tokens, NewTokens):
                    self._put(tokens.rows, output[index, begin:end])
                    if isinstance(tokens.run.capture, Capture):
                        tokens.run.capture.record_state(
                            self._number,
                            tokens.start,
                            self._call,
                            entering[index, :, begin:end],
                            tuple(part[index : index + 1, begin:end] for part in mixed),
                            tuple(part[index : index + 1, begin:end] for part in gates),
                        )
                begin = end
        return torch.cat([before, entering], -1)[..., entering.shape[-1] :], last

    def _inputs(self, stretch: Sequence[Tokens]) -> tuple[Tensor, Gates]:
        """Return what enters the layer of these tokens: [channels, tokens], and the gates [tokens,
        …]."""
        found = [self._inputs_of(tokens) for tokens in stretch]
        entering = torch.cat([entering for entering, _ in found], dim=-1)
        return entering, tuple(map(torch.cat, zip(*(gates for _, gates in found), strict=True)))

    def _inputs_of(self, tokens: Tokens) -> tuple[Tensor, Gates]:
        if isinstance(tokens, NewTokens):
            rows = tokens.rows
            return self._entering[:, rows], tuple(gate[rows] for gate in self._gates)
        state = tokens.kv.states[self._number]
        mixed, *gates = state.inner if tokens.inner else (state.mixed, *state.gates)
        return mixed[tokens.mixed].to(self._entering).T, tuple(
            gate[tokens.gates].to(like) for gate, like in zip(gates, self._gates, strict=True)
        )

    def _put(self, rows: slice, output: Tensor) -> None:
        """Keep the output of rows of the batch: [rows, heads, dim]."""
        if self._output is None:
            tokens = self._entering.shape[-1]
            self._output = output.new_empty(tokens, *output.shape[1:])
        self._output[rows] = output


def _course(new: Sequence[NewTokens], visible: VisibleKV, window: int) -> _Course:
    """Return what a sequence goes through from its state to the last of its ``new`` tokens, where
    convolutions see ``window`` tokens back."""
    position = 0 if visible.state is None else visible.state.position
    stretches: list[Stretch] = []
    for run in new:
        while position < run.start:
            chunk = next(each for each in visible.shared if _covers(each, position))
            begin = position - chunk.start
            end = min(run.start - chunk.start, chunk.last)
            for part in _kept(chunk.kv, begin, end, window):
                _append(stretches, part)
            position = chunk.start + end
        for tokens in run.divided(visible.marks):
            if tokens.start in visible.marks:
                stretches.append(Mark(tokens.start))
            _append(stretches, tokens)
        position = run.end
    return _Course(stretches, visible.state, position)


def _covers(chunk: SharedChunk, position: int) -> bool:
    return chunk.start + chunk.first <= position < chunk.start + chunk.last


def _kept(kv: KV, begin: int, end: int, window: int) -> Iterator[KeptTokens | MappedTokens]:
    """Yield what a chunk keeps of its tokens [begin, end), the one before which is not kept.

    Its map holds where the inner tokens, and all that their convolutions see, are kept.
    """
    state = kv.states[0]
    first, last = state.first, kv.tokens if state.effect is None else kv.tokens - 1
    if begin < first:
        rows = slice(begin, min(end, first))
        yield KeptTokens(kv, rows, rows, inner=False)
    if begin <= max(first - window, 0) and last <= end and first < last:
        yield MappedTokens(kv)
    elif max(begin, first) < min(end, last):
        rows = slice(max(begin, first) - first, min(end, last) - first)
        assert state.inner, "policies that keep some of the inner tokens are refused without these"
        yield KeptTokens(kv, rows, rows, inner=True)
    if last < end:
        row = len(state.mixed) - 1
        yield KeptTokens(kv, slice(row, row + 1), slice(first, first + 1), inner=False)


def _append(stretches: list[Stretch], part: Tokens | MappedTokens) -> None:
    if isinstance(part, MappedTokens):
        stretches.append(part)
    elif stretches and isinstance(stretches[-1], list):
        stretches[-1].append(part)
    else:
        stretches.append([part])


def _length(tokens: Tokens) -> int:
    if isinstance(tokens, NewTokens):
        return tokens.end - tokens.start
    return int(tokens.gates.stop - tokens.gates.start)
