"""A request's tokens in the engine: which of them are still to be computed, and which slots hold
their KV. ``SequenceSlots`` assigns the pool's slots to them, and keeps their KV for later requests
until the slots are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlinker.engines.contract.observation import ChunkWatch, Observer, Observers, QuestionProbe
from kvlinker.engines.embedded.decoding.logprobs import LogprobCollector
from kvlinker.engines.embedded.execution.batch import OwnTokens, Run, SharedChunk, VisibleKV
from kvlinker.engines.embedded.execution.capturing import Capture, Recorder
from kvlinker.engines.embedded.kv_cache.paths import SequencePath
from kvlinker.engines.embedded.kv_cache.pool import SlotAllocator, SlotSpan, cut, slots_of
from kvlinker.engines.embedded.kv_cache.prefixes import PrefixTree
from kvlinker.engines.embedded.kv_cache.spilling import PoolSpill
from kvlinker.engines.embedded.kv_cache.states import SequenceState
from kvlinker.linking.refinement import Refinement
from kvlinker.prompting.segments import Range, ReusedPrefix, StoredKV
from kvlinker.store.loading.arriving import KV, ArrivingKV

NONE = np.empty(0, dtype=np.int64)

GROWTH = 64
"""Slots that a sequence gets ahead of its need, so that it seldom has to grow."""

KEPT_TOKENS = 512
"""The tokens of a prompt after which its beginning is kept, while the rest is computed: a second or
more on CPUs, so that each part of a path is worth its look-up."""


FindPath = Callable[[], SequencePath]


class Refining(NamedTuple):
    """A refinement, and the observer of the question's attention on chunks that its policy needs;
    None if it needs none."""

    refinement: Refinement
    watch: ChunkWatch | None


class TokenSequence:
    """The tokens of a request, some runs of which are computed step by step; generated tokens are
    appended.

    Only the scheduler and the engine's thread use it.
    """

    def __init__(
        self,
        tokens: NDArray[np.int64],
        runs: Sequence[Range],
        *,
        shared: Sequence[SharedChunk] = (),
        path: FindPath | None = None,
        reused: ReusedPrefix | None = None,
        restored: Sequence[tuple[StoredKV, KV | None]] = (),
        most_tokens: int,
        capture: Callable[[], Capture] | None = None,
        answer: Recorder | None = None,
        probe: QuestionProbe | None = None,
        refine: Callable[[], Refining] | None = None,
        logprobs: LogprobCollector | None = None,
        observer: Observer | None = None,
        marks: Sequence[int] = (),
    ) -> None:
        """``tokens`` [prompt] may grow to ``most_tokens``; ``runs`` of them are computed, and see
        ``shared`` chunks. The KV of what is ``reused`` is expected to be in the pool. That of
        ``reused.stored`` is ``restored`` from disk, None where it was lost. ``path`` finds what the
        KV depends on, when that is asked first, for a sequence whose KV may be reused later.

        ``capture`` makes the collector of KV for a sequence that computes chunks; such a sequence
        gives no logits. ``answer`` collects the KV of generated tokens. With ``probe``, the runs
        are those of a first pass, after which ``relink`` is called. ``refine`` makes the refinement
        of a policy that refines. ``logprobs`` gets the hidden states of the prompt's last tokens.
        ``observer`` sees the prompt's attention, but not that of a first pass. At ``marks`` its
        state is kept, where layers keep one.
        """
        self._tokens = np.empty(most_tokens, dtype=np.int64)
        self._tokens[: len(tokens)] = tokens
        self._shared = tuple(shared)
        self._make_capture = capture
        self._answer = answer
        self._refine = refine
        self._logprobs = logprobs
        self._prompt_observer = observer
        self._has_begun = False
        self._has_restarted = False
        self.prompt_length = len(tokens)
        self.length = len(tokens)
        self.spans: tuple[SlotSpan, ...] | None = None
        """Where its own tokens lie, in order, with room for a few more; None for a sequence without
        slots."""

        self._counted_spans: tuple[SlotSpan, ...] | None = None
        self._slot_numbers = NONE  # of the counted spans
        self.state: SequenceState | None = None
        """The state after its tokens so far, in layers that keep one; None before a step has
        computed some, and without such layers."""

        self.marked: dict[int, SequenceState] = {}
        """By position, its states at marks that the prefixes do not have yet."""

        self._marks = tuple(marks)
        self._reused_state: SequenceState | None = None
        self._prompt_state: SequenceState | None = None
        self._is_shared = False
        self._find_path = path
        self.capture: Capture | None = None
        self.probe = probe
        self.refinement: Refinement | None = None
        self.late_count = 0
        """The number of times that the sequence has left a step because a chunk's layer was
        late."""

        self.reused = reused
        self.restored = tuple(restored)
        """The KV that was loaded from disk, until it is copied into slots."""

        self.missed = 0
        """The number of reused tokens that were gone when the sequence got slots for its prompt,
        and are computed again."""

        self.kept = 0
        """The number of its own tokens that were computed when its KV was kept last."""

        self._compute(runs)

    def _compute(self, runs: Sequence[Range]) -> None:
        """Set the runs of the prompt to compute: their tokens are the sequence's own."""
        self._prompt_runs = tuple(runs)
        reused = NONE if self.reused is None else self.reused.own
        prompt = [reused, *[np.arange(begin, end) for begin, end in runs]]
        self.own_in_prompt = sum(map(len, prompt))
        """The number of the prompt's tokens that are the sequence's own."""

        self._own = np.concatenate([*prompt, np.arange(self.prompt_length, len(self._tokens))])
        self.pending = self._missing(len(reused))
        """The positions [begin, end) that are left to compute, ascending."""

        self._own_tokens: OwnTokens | None = None

    def _missing(self, count: int) -> list[Range]:
        """Return the runs to compute if the KV of the first ``count`` of its own tokens is there;
        one of generated tokens follows those of the prompt."""
        prompt = self._own[count : self.own_in_prompt]
        generated = self._own[max(count, self.own_in_prompt) : self.own_length]
        return ranges_of(prompt) + (ranges_of(generated) if len(generated) else [])

    @property
    def own_length(self) -> int:
        """The number of slots that the sequence's own tokens take: those that it computes, prompt
        and generated."""
        return self.own_in_prompt + self.length - self.prompt_length

    @property
    def own(self) -> NDArray[np.int64]:
        """The positions of its own tokens, ascending: [own_length]."""
        return self._own[: self.own_length]

    @property
    def computed_length(self) -> int:
        """The number of its own tokens whose KV is there."""
        return self._own_before(self.pending[0][0]) if self.pending else self.own_length

    @property
    def unfinished_prompt(self) -> NDArray[np.int64]:
        """The positions of its prompt that are left to compute."""
        return self._own[self.computed_length : self.own_in_prompt]

    @property
    def reused_own(self) -> int:
        """The number of its own tokens whose KV an earlier request computed."""
        return 0 if self.reused is None else len(self.reused.own)

    @property
    def most_own(self) -> int:
        """The most slots that the sequence's own tokens may take."""
        return len(self._own)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """All tokens so far, prompt and generated: [length]."""
        return self._tokens[: self.length]

    @property
    def indivisible(self) -> bool:
        """True if all that is left of the prompt is taken at once: a policy that refines has to see
        it whole."""
        return self._refine is not None and not self._has_begun

    @property
    def computed(self) -> bool:
        """True if nothing is left to compute until a token is appended."""
        return not self.pending

    @property
    def decoding(self) -> bool:
        """True if only the token that was generated last is left to compute."""
        return self.pending == [(self.length - 1, self.length)] and self.length > self.prompt_length

    @property
    def path(self) -> SequencePath | None:
        """The path that the KV depends on; None for a sequence whose KV is not reused later."""
        if self._find_path is None:
            return None
        path = self._find_path()
        self._find_path = lambda: path
        return path

    @property
    def path_so_far(self) -> SequencePath:
        """The path of what is computed, of which a first pass computes nothing behind a chunk."""
        path = self.path
        assert path is not None
        if not self.prompt_in_place:
            end = self.pending[0][0] if self.pending else self.prompt_length
            if self.probe is not None:
                end = min([end, *path.chunks])
            return path.computed_to(end)
        if len(path.tokens) < self.prompt_length:
            return path
        return replace(
            path,
            tokens=self._tokens[: self.pending[0][0] if self.pending else self.length].copy(),
        )

    @property
    def reusable_path(self) -> SequencePath | None:
        """The path of the tokens that it takes from kept prefixes when it gets slots: of the prefix
        that it was loaded with, and once it was restarted, of all that it may have computed before.
        None for a sequence whose KV is not kept.

        The last token is left out, since its logits are needed, and so are generated tokens that
        are collected. What follows the loaded prefix is of no use to a first pass, after which
        other tokens are computed, and to a policy that refines, which has to see all of its tokens.
        """
        if self.path is None:
            return None
        loaded = self.path.up_to((0 if self.reused is None else self.reused.length) - 1)
        if not self._has_restarted or self.probe is not None or self._refine is not None:
            return loaded
        end = self.length - 1
        if self._answer is not None:
            end = min(end, self.prompt_length)
        computed = replace(self.path, tokens=self.tokens).computed_to(end)
        return max(loaded, computed, key=lambda path: len(path.tokens))

    @property
    def prompt_in_place(self) -> bool:
        """True if the slots hold the KV of the whole prompt as it was linked."""
        if self.spans is None or not self._has_begun or self.probe is not None:
            return False
        return not self.pending or self.pending[0][0] >= self.prompt_length

    @property
    def arriving(self) -> tuple[ArrivingKV, ...]:
        """The shared chunks' KV of which some layers have not arrived."""
        found = (chunk.kv for chunk in self._shared)
        return tuple(kv for kv in found if isinstance(kv, ArrivingKV) and not kv.complete)

    @property
    def lost(self) -> bool:
        """True if a shared chunk can no longer be loaded completely."""
        return any(kv.lost for kv in self.arriving)

    def relink(
        self,
        runs: Sequence[Range],
        refine: Callable[[], Refining] | None,
        path: FindPath | None = None,
    ) -> None:
        """Compute these runs instead, after the first pass."""
        keeps_state = self.state is not None
        self.probe, self.state = None, self._reused_state
        self._find_path = path
        self._has_begun = refine is None
        self._refine = refine
        self._compute(runs)
        if keeps_state and self.state is None:
            self.pending = self._missing(0)

    def begin_again(self, tokens: NDArray[np.int64], capture: Callable[[], Capture]) -> None:
        """Compute these tokens instead, no more than before, for another ``capture``: what was
        computed is of no use to them."""
        self._tokens[: len(tokens)] = tokens
        self.prompt_length = self.length = len(tokens)
        self._make_capture = capture
        self.restart()
        self._compute([(0, len(tokens))])

    def append(self, token: int) -> None:
        """Append a generated token, which is computed next."""
        self._tokens[self.length] = token
        self.pending.append((self.length, self.length + 1))
        self.length += 1

    def fork(self) -> TokenSequence:
        """Return a sequence for the same prompt, which is computed, with no generated tokens and no
        slots."""
        self._is_shared = self.state is not None
        self._prompt_state = self.state
        forked = TokenSequence(
            self.tokens[: self.prompt_length],
            self._prompt_runs,
            shared=self._shared,
            path=self._find_path,
            reused=self.reused,
            most_tokens=len(self._tokens),
            refine=self._refine,
        )
        forked.refinement, forked.missed = self.refinement, self.missed
        forked._is_shared = self._is_shared
        return forked

    def reach(self, states: Sequence[SequenceState]) -> None:
        """Note what tokens amount to, now that they are computed: at marks, and all that were
        taken."""
        self.state = state = states[-1]
        wanted = self._marks if self.probe is None else ()
        self.marked |= {each.position: each for each in states if each.position in wanted}
        if self._is_shared and state.position == self.prompt_length:
            self._prompt_state = state

    def adopt_prompt(self, other: TokenSequence) -> None:
        """Mark the prompt as computed: its slots are the ``other`` sequence's too, or were."""
        self._has_begun = True
        self.state = self._prompt_state = other._prompt_state
        self.pending = self._missing(self.own_in_prompt)

    def adopt(self, count: int, state: SequenceState | None) -> None:
        """Mark the first ``count`` of its own tokens, whose KV is there, as computed, to
        ``state``."""
        self.state = self._reused_state = state
        self.pending = self._missing(count)
        if self.length == self.prompt_length:  # else its prompt had been computed before
            self.missed = max(self.missed, self.reused_own - count)

    def restart(self) -> None:
        """Compute everything again that is not found among kept prefixes: the slots are gone."""
        self._has_begun = False
        self._has_restarted = True
        self.capture = self.state = self._reused_state = None
        self.marked.clear()
        self.kept = 0
        self._own_tokens = None
        self.pending = self._missing(0)

    def take(self, budget: int) -> tuple[list[Run], VisibleKV]:
        """Return the next runs, of at most ``budget`` tokens in all, and what they see, and mark
        them as done.

        A prompt whose policy refines (``indivisible``) is taken whole, whatever the budget, since
        what it keeps depends on all of its tokens and on no others.
        """
        runs, visible, self.pending = self._next(budget)
        return runs, visible

    def peek(self, budget: int) -> tuple[list[Run], VisibleKV]:
        """Return what ``take`` would of what is not ``indivisible``, and mark nothing as done."""
        assert not self.indivisible
        return self._next(budget)[:2]

    def _next(self, budget: int) -> tuple[list[Run], VisibleKV, list[Range]]:
        """Return the next runs, what they see, and what is left to compute behind them."""
        assert self.spans is not None
        refining: Refining | None = None
        if not self._has_begun:
            self._has_begun = True
            self._own_tokens = None
            self.capture = None if self._make_capture is None else self._make_capture()
            if self._refine is not None:
                refining = self._refine()
                self.refinement = refining.refinement
                budget = self.prompt_length
        taken: list[Range] = []
        left = list(self.pending)
        while left and budget > 0:
            begin, end = left[0]
            if begin >= self.prompt_length and (refining or self._ends_prompt(taken)):
                break
            stop = min(end, begin + budget)
            taken.append((begin, stop))
            budget -= stop - begin
            if stop == end:
                left.pop(0)
            else:
                left[0] = (stop, end)
        wants_logits = not left and self.capture is None and self.probe is None
        slots = self._slots if taken else NONE
        runs = []
        for begin, end in taken:
            own = self._own_before(begin)
            run = Run(
                slots[own : own + end - begin],
                begin,
                self._tokens[begin:end],
                wants_logits=wants_logits and (begin, end) == taken[-1],
                capture=self._answer if begin >= self.prompt_length else self.capture,
                refinement=None if refining is None else refining.refinement,
                observer=self._observer(refining, begin),
                logprobs=self._logprobs if self.probe is None else None,
                owner=self,
            )
            runs.append(run)
        seen = self._own_before(taken[-1][1]) if taken else 0
        visible = VisibleKV(
            self._shared,
            tuple(cut(self.spans, 0, seen)),
            self._own[:seen],
            self._visibility(),
            self.state,
            self._marks if self.probe is None else (),
        )
        return runs, visible, left

    @property
    def _slots(self) -> NDArray[np.int64]:
        """The slots of its own tokens, in order."""
        assert self.spans is not None
        if self._counted_spans is not self.spans:
            self._counted_spans, self._slot_numbers = self.spans, slots_of(self.spans)
        return self._slot_numbers

    def _ends_prompt(self, taken: Sequence[Range]) -> bool:
        """Return whether a step shall end with the prompt, of which it has ``taken`` the last
        tokens: other sequences go on from there, too."""
        return self._is_shared and bool(taken) and taken[-1][1] == self.prompt_length

    def _own_before(self, position: int) -> int:
        """Count the sequence's own tokens that stand before the position."""
        return int(np.searchsorted(self._own, position))

    def _visibility(self) -> OwnTokens:
        if self._own_tokens is None:
            dropped = () if self.refinement is None else self.refinement.dropped
            self._own_tokens = OwnTokens(self._own[: self.own_in_prompt], self._shared, dropped)
        return self._own_tokens

    def _observer(self, refining: Refining | None, begin: int) -> Observer | None:
        """Return the observer of a run that begins at this position."""
        if self.capture is not None:
            return self.capture.scores
        if self.probe is not None:
            return self.probe
        watch = None if refining is None else refining.watch
        own = self._prompt_observer if begin < self.prompt_length else None
        return Observers(watch, own) if watch is not None and own is not None else watch or own


def ranges_of(positions: NDArray[np.int64]) -> list[Range]:
    """Return the maximal ranges [begin, end) of ascending ``positions``."""
    edges = np.flatnonzero(np.diff(positions) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(positions, edges) if part.size]


class SequenceSlots:
    """Assigns slots to sequences. Nothing else changes ``TokenSequence.spans``."""

    def __init__(
        self,
        slots: int,
        *,
        keeps_prefixes: bool = False,
        spill: PoolSpill | None = None,
        states: int | None = None,
        is_finite: Callable[[Sequence[SlotSpan]], bool] = lambda spans: True,
    ) -> None:
        """``keeps_prefixes``: the KV of sequences is kept for later ones that begin alike, and,
        with a ``spill``, on disk when the slots are needed. ``states`` is the number of states to
        keep with it, for a model whose layers keep one. ``is_finite`` returns whether the KV in
        slots is: a prompt's beginning has no logits that would show it."""
        self._allocator = SlotAllocator(slots)
        self._spill = spill
        self.prefixes = PrefixTree(self._allocator, spill, states)
        self.keeps_prefixes = keeps_prefixes
        self._is_finite = is_finite

    @property
    def total(self) -> int:
        """The number of all slots."""
        return self._allocator.slots

    @property
    def used(self) -> int:
        """The number of slots that sequences hold."""
        return self._allocator.used - self.kept

    @property
    def kept(self) -> int:
        """The number of slots that only hold KV for reuse."""
        return int(np.count_nonzero(self._allocator.users(self.prefixes.spans) == 1))

    def admit(self, sequence: TokenSequence, linked: TokenSequence | None = None) -> bool:
        """Give the sequence slots for its tokens, and a few more; False if there are too few.

        The slots of its tokens in kept prefixes are shared, as far as they are still there, and
        what was loaded of them from disk is copied into its own. With ``linked``, a sequence for
        the same prompt whose KV is in place, the two share the prompt's slots, unless prefixes have
        more.
        """
        computed: tuple[SlotSpan, ...] = ()
        state: SequenceState | None = None
        if (path := sequence.reusable_path) is not None:
            computed, state = self.prefixes.acquire(path, sequence.own)
        there = sum(span.size for span in computed)
        if linked is not None and there >= linked.own_in_prompt:
            linked = None
        if linked is not None:
            assert linked.spans is not None
            self._allocator.release(computed)
            computed = tuple(cut(linked.spans, 0, linked.own_in_prompt))
            self._allocator.share(computed)
            there = linked.own_in_prompt
        more = self._allocate(_slots_needed(sequence) - there)
        if more is None:
            self._allocator.release(computed)
            return False
        sequence.spans = (*computed, *more)
        if linked is not None:
            sequence.adopt_prompt(linked)
        else:
            sequence.adopt(self._restore(sequence, there), state)
        return True

    def would_fit(self, sequence: TokenSequence, without: Iterable[TokenSequence]) -> bool:
        """Return whether there would be slots for the sequence if those of ``without`` and of
        prefixes were free."""
        freed = chain(self.prefixes.spans, *(other.spans or () for other in without))
        return self._allocator.free_without(freed) >= _slots_needed(sequence)

    def grow(self, sequence: TokenSequence) -> bool:
        """Make sure that the sequence holds slots for all of its tokens; False if there are too
        few."""
        assert sequence.spans is not None
        size = sum(span.size for span in sequence.spans)
        if size >= sequence.own_length:
            return True
        last = self._allocator.extend(sequence.spans[-1], _slots_needed(sequence) - size)
        sequence.spans = (*sequence.spans[:-1], last)
        lacking = sequence.own_length - sum(span.size for span in sequence.spans)
        if lacking <= 0:
            return True
        more = self._allocate(
            min(lacking + GROWTH, sequence.most_own - sequence.own_length + lacking)
        )
        more = more or self._allocate(lacking)
        sequence.spans = (*sequence.spans, *(more or ()))
        return more is not None

    def hand_over(self, sequence: TokenSequence, heir: TokenSequence) -> None:
        """Give all slots of one sequence, in which the prompt's KV is in place, to another one for
        the same prompt."""
        self.keep(sequence)
        assert sequence.spans is not None
        own = tuple(cut(sequence.spans, 0, sequence.own_in_prompt))
        self._allocator.share(own)
        self._allocator.release(sequence.spans)
        heir.spans, sequence.spans = own, None
        heir.adopt_prompt(sequence)

    def keep(self, sequence: TokenSequence) -> None:
        """Keep the sequence's KV so far for later ones that begin alike, also where that is only
        the beginning of its prompt."""
        if not self.keeps_prefixes:
            sequence.marked.clear()  # nobody will go on from these states
            return
        if sequence.path is None:
            return
        path, count = sequence.path_so_far, sequence.computed_length
        assert sequence.spans is not None
        own = sequence.own[:count]
        own = own[own < len(path.tokens)]
        states = list(sequence.marked.values())
        if sequence.state is not None:
            states.append(sequence.state)
        if not sequence.prompt_in_place:
            states = [state for state in states if state.position <= len(path.tokens)]
            if not self._is_sound(cut(sequence.spans, 0, len(own)), states):
                return
        path = path.up_to(max([*own[-1:], *(state.position - 1 for state in states)], default=-1))
        if len(path.tokens):  # chunks alone hold no slots that they would be given up for
            self.prefixes.insert(path, own, sequence.spans, states)
        sequence.kept = count
        sequence.marked.clear()

    def keep_beginning(self, sequence: TokenSequence) -> None:
        """Keep the KV of a prompt that goes on to be computed, once there are ``KEPT_TOKENS`` more:
        its caller may leave, and ask again before the step ends in which that is noticed."""
        wanted = self.keeps_prefixes and sequence.probe is None and sequence.state is None
        if wanted and sequence.computed_length - sequence.kept >= KEPT_TOKENS:
            self.keep(sequence)

    def _is_sound(self, spans: Sequence[SlotSpan], states: Sequence[SequenceState]) -> bool:
        """Return whether the KV in these slots, and the states, may be kept: NaN in them would
        reach all that begin alike."""
        return self._is_finite(spans) and all(state.is_finite for state in states)

    def exclusive_slots(self, sequence: TokenSequence) -> NDArray[np.int64]:
        """Return the slots that neither another sequence nor a kept prefix holds."""
        if not sequence.spans:
            return np.zeros(0, np.int64)
        alone: NDArray[np.bool_] = self._allocator.users(sequence.spans) == 1
        return slots_of(sequence.spans)[alone]

    def release(self, sequence: TokenSequence) -> None:
        """Keep the sequence's KV as a prefix for later sequences, and take its slots back."""
        assert sequence.spans is not None
        self.keep(sequence)
        self._allocator.release(sequence.spans)
        sequence.spans = None

    def check_integrity(self, holders: Sequence[TokenSequence]) -> None:
        """Check that only these sequences and the kept prefixes hold slots. Raises AssertionError
        otherwise."""
        assert all(sequence.spans is not None for sequence in holders)
        held = [span for sequence in holders for span in sequence.spans or ()]
        self._allocator.check_integrity([*held, *self.prefixes.spans])

    def _restore(self, sequence: TokenSequence, count: int) -> int:
        """Copy KV that was loaded from disk for the sequence into its slots, after the first
        ``count`` of its own tokens, whose KV is there; returns how many it is there of now."""
        assert sequence.spans is not None
        slots = slots_of(sequence.spans)
        begin = sequence.reused_own - sum(len(part) for part, _ in sequence.restored)
        for part, kv in sequence.restored:
            end = begin + len(part)
            if begin <= count < end and kv is not None and self._spill is not None:
                self._spill.restore(kv, part.first + count - begin, part.last, slots[count:end])
                count = end
            begin = end
        sequence.restored = ()
        return count

    def _allocate(self, size: int) -> tuple[SlotSpan, ...] | None:
        """Return ``size`` slots, for which prefixes are evicted; None, and none is evicted, if
        sequences hold too many."""
        if self._allocator.free < size:
            if self._allocator.free_without(self.prefixes.spans) < size:
                return None
            self.prefixes.evict(size)
        return self._allocator.allocate(size)


def _slots_needed(sequence: TokenSequence) -> int:
    """Return the number of slots that all of the sequence's own tokens need now, and a few more."""
    return min(sequence.own_length + GROWTH, sequence.most_own)
