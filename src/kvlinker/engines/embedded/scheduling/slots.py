"""Assigns slots of the pool to sequences, and keeps their KV for later ones until the slots are
needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvlinker.engines.embedded.kv_cache.pool import SlotAllocator, SlotSpan, cut, slots_of
from kvlinker.engines.embedded.kv_cache.prefixes import PrefixTree
from kvlinker.engines.embedded.kv_cache.spilling import PoolSpill
from kvlinker.engines.embedded.kv_cache.states import SequenceState
from kvlinker.engines.embedded.requests.sequence import TokenSequence

GROWTH = 64
"""Slots that a sequence gets ahead of its need, so that it seldom has to grow."""

KEPT_TOKENS = 512
"""The tokens of a prompt after which its beginning is kept, while the rest is computed: a second or
more on CPUs, so that each part of a path is worth its look-up."""


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
        self._keeps = keeps_prefixes
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

        With ``linked``, a sequence for the same prompt whose KV is in place, the two share the
        prompt's slots. Else those of the prefix that it reuses are shared, as far as they are still
        there, and what was loaded of it from disk is copied into its own.
        """
        state: SequenceState | None = None
        if linked is not None:
            assert linked.spans is not None
            computed = tuple(cut(linked.spans, 0, linked.own_in_prompt))
            self._allocator.share(computed)
        elif sequence.reused is not None and sequence.path is not None:
            computed, state = self.prefixes.acquire(sequence.path, sequence.reused)
        else:
            computed = ()
        there = sum(span.size for span in computed)
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
        if not self._keeps:
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
        wanted = self._keeps and sequence.probe is None and sequence.state is None
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
