"""Computes the layers that keep a state, in one forward pass over a batch: each sequence's tokens
after its own state, and after the effects of the chunks before them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvlinker.engines.embedded.execution.batch import Batch
from kvlinker.engines.embedded.execution.capturing import Capture
from kvlinker.engines.embedded.execution.courses import (
    Course,
    MappedTokens,
    Mark,
    NewTokens,
    Stretch,
    Tokens,
    alike,
    course_of,
)
from kvlinker.engines.embedded.kv_cache.states import LayerState, SequenceState
from kvlinker.engines.embedded.model.anatomy import Anatomy
from kvlinker.engines.embedded.model.states.delta_rule import DeltaRule, delta_rule
from kvlinker.engines.embedded.model.states.recurrence import ConvolutionCall, Recurrence
from kvlinker.engines.embedded.model.states.rules import Effect, Gates, Mixed, RuleCall
from kvlinker.engines.embedded.model.states.stepping import AnyLength


class RecurrentPass:
    """Replaces the convolution and the rule of the layers that keep a state, layer by layer."""

    def __init__(self, anatomy: Anatomy, *, native: bool) -> None:
        self._native = native
        self._anatomy = anatomy
        self._courses: dict[object, Course] = {}
        self._layer = 0
        self._convolved: deque[_Layer] = deque()

    def enter(self, batch: Batch) -> None:
        """Compute the tokens of ``batch`` from now on: those of the batch before, or the rest of
        them."""
        if not self._anatomy.recurrences:
            return
        rows = defaultdict[object, list[NewTokens]](list)
        for run, part in batch.rows:
            rows[run.owner].append(NewTokens(run, part, run.start))
        found = {
            owner: course_of(new, batch.visible_kv[owner], self._anatomy)
            for owner, new in rows.items()
        }
        for owner, course in found.items():
            if owner in self._courses:
                course.layers = self._courses[owner].layers
        self._courses = found

    def states(self) -> dict[object, tuple[SequenceState, ...]]:
        """Return the states of all sequences at their marks, ascending, and after this step, once
        all layers are computed; none at marks that stand among tokens that a policy dropped."""
        return {
            owner: tuple(
                SequenceState(position, tuple(layers))
                for position, layers in sorted(course.layers.items())
                if len(layers) == len(self._anatomy.recurrences)
            )
            for owner, course in self._courses.items()
        }

    def convolve(self, call: ConvolutionCall) -> Tensor:
        """Return the convolution's output, [1, channels, tokens]. If the model only splits it for a
        rule, only the shape matters; if it computes more with it, the convolved values of chunks'
        tokens are included."""
        parts = self._anatomy.parts(self._layer)
        groups = alike(self._courses)
        layers = [
            _Layer(recurrence, self._layer + number, part)
            for number, (recurrence, part) in enumerate(
                zip(parts, call.divided(len(parts)), strict=True)
            )
        ]
        for layer in layers:
            layer.convolve(groups)
        if parts[0].rule is None:
            self._layer += 1
            return layers[0].finish().transpose(1, 2)
        self._convolved.extend(layers)
        if parts[0].columns:
            return call.hidden
        together = torch.cat([layer.convolved() for layer in layers], 1)
        return together if len(parts) == 1 else together.as_subclass(AnyLength)

    def recur(self, call: RuleCall) -> tuple[Tensor, None]:
        """Return the rule's output [1, tokens, heads, dim]."""
        layer = self._convolved.popleft()
        shape = self._anatomy.recurrences[self._layer].state_shape
        rule = delta_rule(call, shape, call.mixed[0].device) if self._native else None
        self._layer += 1
        return layer.finish(call if rule is None else rule.taking_over(call), rule), None


class _Part(NamedTuple):
    """One stretch of sequences that are computed together."""

    stretches: tuple[Stretch, ...]
    """One of each sequence, of the same kind and length."""

    before: Tensor
    """The window of its convolution: [sequences, channels, window]."""

    begin: int
    """The number of tokens that were convolved before it."""

    entering: Tensor | None = None
    """Where it is tokens one by one, what enters of them: [sequences, channels, tokens]."""

    convolved: Tensor | None = None
    """The convolution's output for them: [sequences, channels, tokens]."""

    mixed: Mixed = ()
    """The arguments of a rule that only take that apart: [sequences, tokens, …] each."""

    @property
    def tokens(self) -> list[list[Tokens]]:
        """The stretches, where they are tokens one by one; none otherwise."""
        return [stretch for stretch in self.stretches if isinstance(stretch, list)]

    @property
    def size(self) -> int:
        """The number of tokens that are convolved, of all sequences."""
        return 0 if self.entering is None else len(self.entering) * self.entering.shape[-1]


class _Group(NamedTuple):
    """Sequences that are computed together."""

    courses: Sequence[Course]
    parts: Sequence[_Part]

    before: Tensor
    """The window of convolutions after the step: [sequences, channels, window]."""

    @property
    def takes_a_step(self) -> bool:
        """True if each sequence has one token, of which only the output is wanted."""
        found = [course.only for course in self.courses]
        return all(each and len(each) == 1 and not each.run.capture for each in found)


class _Layer:
    """One layer, in one forward pass."""

    def __init__(self, recurrence: Recurrence, number: int, call: ConvolutionCall) -> None:
        self._recurrence = recurrence
        self._number = number
        self._convolution = call
        self._entering = call.hidden[0]
        self._groups: list[_Group] = []
        self._output: Tensor | None = None

    def convolve(self, groups: Sequence[Sequence[Course]]) -> None:
        """Convolve all sequences, those of a group together."""
        begin = 0
        for courses in groups:
            before = torch.stack([self._state(course).before for course in courses])
            parts = []
            for stretches in zip(*(course.stretches for course in courses), strict=True):
                part = self._part(stretches, before, begin)
                begin += part.size
                parts.append(part)
                before = self._behind(part)
            self._groups.append(_Group(courses, self._with_convolved(parts), before))

    def _with_convolved(self, parts: Sequence[_Part]) -> list[_Part]:
        """Return the parts with what is convolved of their tokens: of all in one call, since each
        token sees those of its own part alone, after what its convolution sees."""
        pieces = [
            torch.cat([part.before, part.entering], -1)
            for part in parts
            if part.entering is not None
        ]
        if not pieces:
            return list(parts)
        together, window = torch.cat(pieces, -1), self._recurrence.window
        convolved = self._convolution.apply(together[..., :window], together[..., window:])
        mixed = self._recurrence.mixed(convolved)
        found, begin = [], 0
        for part in parts:
            if part.entering is not None:
                rows = slice(begin, begin + part.entering.shape[-1])
                part = part._replace(
                    convolved=convolved[..., rows], mixed=tuple(each[:, rows] for each in mixed)
                )
                begin = rows.stop + window
            found.append(part)
        return found

    def convolved(self) -> Tensor:
        """Return the convolution's output of all tokens, those of chunks too: [1, channels,
        tokens]."""
        found = (part.convolved for group in self._groups for part in group.parts)
        return torch.cat([each for rows in found if rows is not None for each in rows], -1)[None]

    def finish(self, call: RuleCall | None = None, rule: DeltaRule | None = None) -> Tensor:
        """Return the output of all tokens of the batch, [1, tokens, …]: the rule's, or what is
        convolved where there is none. Sequences that take a step are computed by ``rule``, each
        from and to where its state lies."""
        states: Sequence[Tensor] | Tensor
        for group in self._groups:
            if call is not None and rule is not None and group.takes_a_step:
                states = self._stepped(group, call, rule)
            else:
                states = self._behind_all(group, call)
            for course, before, state in zip(group.courses, group.before, states, strict=True):
                course.layers[course.end].append(LayerState(before, state))
        assert self._output is not None, "a batch has tokens"
        return self._output[None]

    def _stepped(self, group: _Group, call: RuleCall, rule: DeltaRule) -> Sequence[Tensor]:
        """Return the states after one token of each sequence."""
        (part,) = group.parts
        states = [self._state(course).state for course in group.courses]
        gates = self._gates(part, call)
        output, after = rule(self._mixed(part, call), gates, states)
        for index, tokens, _ in _new_tokens(part):
            self._put(tokens.rows, output[index])
        return after

    def _behind_all(self, group: _Group, call: RuleCall | None) -> Tensor:
        """Return the states after all parts: [sequences, heads, rows, columns]."""
        state = torch.stack([self._state(course).state for course in group.courses])
        for part in group.parts:
            kind = part.stretches[0]
            if isinstance(kind, Mark):
                marked = LayerState(part.before[0], state[0])
                group.courses[0].layers[kind.position].append(marked)
            elif call is None:
                self._keep(part)
            elif isinstance(kind, MappedTokens):
                effect = kind.kv.states[self._number].effect
                assert effect is not None
                state = self._recurrence.applied(Effect(*effect), state)
            else:
                state = self._scanned(part, call, state)
                if state.untyped_storage().nbytes() > state.nbytes:
                    state = state.clone()  # without those before it
        return state

    def _state(self, course: Course) -> LayerState:
        """Return a sequence's state before this step."""
        if course.before is not None:
            return course.before.layers[self._number]
        shape = self._recurrence
        return LayerState(
            self._entering.new_zeros(shape.channels, shape.window),
            torch.zeros(shape.state_shape, device=self._entering.device),
        )

    def _part(self, stretches: tuple[Stretch, ...], before: Tensor, begin: int) -> _Part:
        part = _Part(stretches, before, begin)
        if not part.tokens:
            return part
        return part._replace(
            entering=torch.stack([self._entering_of(stretch) for stretch in part.tokens])
        )

    def _behind(self, part: _Part) -> Tensor:
        """Return the window of a convolution after this part: [sequences, channels, window]."""
        kind, window = part.stretches[0], self._recurrence.window
        if isinstance(kind, Mark):
            return part.before
        if isinstance(kind, MappedTokens):
            kept = kind.kv.states[self._number].mixed
            return kept[len(kept) - 1 - window : -1].to(self._entering).T[None]
        assert part.entering is not None
        together = torch.cat([part.before, part.entering], -1)
        return together[..., part.entering.shape[-1] :].clone()  # without all that entered

    def _keep(self, part: _Part) -> None:
        """Keep the convolved inputs of the batch's tokens as their output."""
        if part.convolved is None or part.entering is None:
            return
        for index, tokens, place in _new_tokens(part):
            self._put(tokens.rows, part.convolved[index, :, place].T)
            if isinstance(tokens.run.capture, Capture):
                entering = part.entering[index, :, place]
                tokens.run.capture.record_state(self._number, tokens.start, entering)

    def _scanned(self, part: _Part, call: RuleCall, state: Tensor) -> Tensor:
        """Return the states after tokens, and keep the output of those of the batch."""
        assert part.entering is not None
        gates = self._gates(part, call)
        mixed = self._mixed(part, call)
        output, last = call.scan(mixed, gates, state)
        for index, tokens, place in _new_tokens(part):
            self._put(tokens.rows, output[index, place])
            if isinstance(tokens.run.capture, Capture):
                tokens.run.capture.record_state(
                    self._number,
                    tokens.start,
                    part.entering[index, :, place],
                    call,
                    tuple(each[index : index + 1, place] for each in mixed),
                    tuple(each[index : index + 1, place] for each in gates),
                )
        return last

    def _entering_of(self, stretch: Sequence[Tokens]) -> Tensor:
        """Return the layer's inputs of these tokens: [channels, tokens]."""
        found = []
        for tokens in stretch:
            if isinstance(tokens, NewTokens):
                found.append(self._entering[:, tokens.rows])
            else:
                kept = tokens.kv.states[self._number]
                rows = (kept.inner[0] if tokens.inner else kept.mixed)[tokens.rows]
                found.append(rows.to(self._entering).T)
        return torch.cat(found, dim=-1)

    def _mixed(self, part: _Part, call: RuleCall) -> Mixed:
        """Return the arguments of a rule that are made of what is convolved of a part's tokens:
        [sequences, tokens, …] each."""
        if self._recurrence.columns:
            return part.mixed
        rows = slice(part.begin, part.begin + part.size)
        found = (each[0, rows] for each in call.mixed)
        return tuple(each.reshape(len(part.tokens), -1, *each.shape[1:]) for each in found)

    def _gates(self, part: _Part, call: RuleCall) -> Gates:
        """Return the other inputs of a rule for a part's tokens: [sequences, tokens, …] each."""
        found = [self._gates_of(stretch, call) for stretch in part.tokens]
        return tuple(map(torch.stack, zip(*found, strict=True)))

    def _gates_of(self, stretch: Sequence[Tokens], call: RuleCall) -> Gates:
        found = []
        for tokens in stretch:
            if isinstance(tokens, NewTokens):
                found.append(tuple(gate[0, tokens.rows] for gate in call.gates))
            else:
                kept = tokens.kv.states[self._number]
                gates = kept.inner[1:] if tokens.inner else kept.gates
                found.append(
                    tuple(
                        gate[tokens.rows].to(like)
                        for gate, like in zip(gates, call.gates, strict=True)
                    )
                )
        return tuple(map(torch.cat, zip(*found, strict=True)))

    def _put(self, rows: slice, output: Tensor) -> None:
        """Keep the output of rows of the batch: [rows, …]."""
        if self._output is None:
            tokens = self._entering.shape[-1]
            self._output = output.new_empty(tokens, *output.shape[1:])
        self._output[rows] = output


def _new_tokens(part: _Part) -> Iterator[tuple[int, NewTokens, slice]]:
    """Yield the tokens of the batch in a part: the number of their sequence, and their place in its
    stretch."""
    for index, stretch in enumerate(part.tokens):
        begin = 0
        for tokens in stretch:
            if isinstance(tokens, NewTokens):
                yield index, tokens, slice(begin, begin + len(tokens))
            begin += len(tokens)
