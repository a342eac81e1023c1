"""The course of each sequence of a batch in layers that keep a state: tokens one by one, and the
stored effects of chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvlinker.engines.embedded.execution.batch import Run, SharedChunk, VisibleKV
from kvlinker.engines.embedded.kv_cache.states import LayerState, SequenceState
from kvlinker.engines.embedded.model.anatomy import Anatomy
from kvlinker.engines.embedded.model.states.kept_states import first_edge, last_edge
from kvlinker.store.loading.arriving import KV


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens of the batch, from the position ``start`` on."""

    run: Run
    rows: slice
    start: int

    def __len__(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def end(self) -> int:
        """The position after the last of them."""
        return self.start + len(self)

    def divided(self, marks: Sequence[int]) -> Iterator[NewTokens]:
        """Yield its parts between the marks inside of it."""
        edges = [self.start, *(mark for mark in marks if self.start < mark < self.end), self.end]
        for begin, end in pairwise(edges):
            first = self.rows.start - self.start
            yield NewTokens(self.run, slice(first + begin, first + end), begin)


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Tokens of a chunk that it keeps one by one: ``rows`` of its edges, or of its inner tokens.
    They are ``count``."""

    kv: KV
    rows: slice
    count: int
    inner: bool

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True, slots=True)
class MappedTokens:
    """The inner tokens of a chunk, of which it keeps the joint effect."""

    kv: KV


@dataclass(frozen=True, slots=True)
class Mark:
    """A place between tokens, where the state is wanted."""

    position: int


Tokens = NewTokens | KeptTokens
Stretch = list[Tokens] | MappedTokens | Mark
"""Neighbouring parts of a sequence: tokens one by one, or a map."""


@dataclass(slots=True)
class Course:
    """The course of one sequence in a step, in order."""

    stretches: list[Stretch]
    before: SequenceState | None
    end: int
    """The position after the last token."""

    layers: dict[int, list[LayerState]] = field(default_factory=lambda: defaultdict(list))
    """The states at each mark, and after the last token, of the layers that were computed."""

    @property
    def only(self) -> NewTokens | None:
        """All that it goes through, where that is one run; None otherwise."""
        stretch, *others = self.stretches
        if others or not isinstance(stretch, list) or len(stretch) > 1:
            return None
        return stretch[0] if isinstance(stretch[0], NewTokens) else None


def course_of(new: Sequence[NewTokens], visible: VisibleKV, anatomy: Anatomy) -> Course:
    """Return the course of a sequence from its state to the last of its ``new`` tokens."""
    position = 0 if visible.state is None else visible.state.position
    stretches: list[Stretch] = []
    for run in new:
        while position < run.start:
            chunk = next(each for each in visible.shared if _covers(each, position))
            begin = position - chunk.start
            end = min(run.start - chunk.start, chunk.last)
            for part in _kept(chunk.kv, begin, end, anatomy):
                _append(stretches, part)
            position = chunk.start + end
        for tokens in run.divided(visible.marks):
            if tokens.start in visible.marks:
                stretches.append(Mark(tokens.start))
            _append(stretches, tokens)
        position = run.end
    return Course(stretches, visible.state, position)


def alike(courses: dict[object, Course]) -> list[list[Course]]:
    """Return the sequences that are computed together: those with a single run of the same length,
    and any other alone."""
    groups = defaultdict[object, list[Course]](list)
    for owner, course in courses.items():
        only = course.only
        groups[owner if only is None else len(only)].append(course)
    return list(groups.values())


def _covers(chunk: SharedChunk, position: int) -> bool:
    return chunk.start + chunk.first <= position < chunk.start + chunk.last


def _kept(kv: KV, begin: int, end: int, anatomy: Anatomy) -> Iterator[KeptTokens | MappedTokens]:
    """Yield the kept parts of a chunk's tokens [begin, end), the one before which is not kept.

    Its map holds where the inner tokens, and all that their convolutions see, are kept. Where there
    are only convolutions, of tokens after which another one is computed those are of use that its
    convolutions see.
    """
    window = anatomy.window
    if anatomy.only_convolves:
        begin = max(begin, end - window)
        first, last = 0, last_edge(kv.tokens, window)
        whole = False
    else:
        first = first_edge(kv.states, kv.tokens, window)
        last = kv.tokens if first == kv.tokens else kv.tokens - 1
        whole = begin <= max(first - window, 0) and last <= end and first < last
    if begin < first:
        rows = slice(begin, min(end, first))
        yield KeptTokens(kv, rows, rows.stop - rows.start, inner=False)
    if whole:
        yield MappedTokens(kv)
    elif max(begin, first) < min(end, last):
        rows = slice(max(begin, first) - first, min(end, last) - first)
        assert kv.states[0].inner, "policies that keep some of the inner tokens are refused then"
        yield KeptTokens(kv, rows, rows.stop - rows.start, inner=True)
    if last < end:
        begin = max(begin, last)
        rows = slice(begin - kv.tokens, end - kv.tokens or None)
        yield KeptTokens(kv, rows, end - begin, inner=False)


def _append(stretches: list[Stretch], part: Tokens | MappedTokens) -> None:
    if isinstance(part, MappedTokens):
        stretches.append(part)
    elif stretches and isinstance(stretches[-1], list):
        stretches[-1].append(part)
    else:
        stretches.append([part])
