"""A request's tokens in the engine: which of them are still to be computed, and which slots hold their KV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlinker.embedded.batch import Capture, OwnTokens, Run, SharedChunk, Sight, SlotSpan
from kvlinker.embedded.pool import Move, SlotAllocator, SlotRange
from kvlinker.embedded.scoring import LogprobCollector
from kvlinker.engine.observation import ChunkWatch, Observer, QuestionProbe
from kvlinker.linking.plan import Range
from kvlinker.linking.refinement import Refinement
from kvlinker.store.loading.arriving import ArrivingKV

GROWTH = 64
"""Slots that a sequence gets ahead of its need, so that it seldom has to grow."""


class Refining(NamedTuple):
    """A refinement, and the observer of the question's attention on chunks that its policy needs; None if it needs
    none."""

    refinement: Refinement
    watch: ChunkWatch | None


class TokenSequence:
    """The tokens of a request, some runs of which are computed step by step; generated tokens are appended.

    Only the scheduler and the engine's thread use it.
    """

    def __init__(
        self,
        tokens: NDArray[np.int64],
        runs: Sequence[Range],
        *,
        shared: Sequence[SharedChunk] = (),
        most_tokens: int,
        capture: Callable[[], Capture] | None = None,
        probe: QuestionProbe | None = None,
        refine: Callable[[], Refining] | None = None,
        logprobs: LogprobCollector | None = None,
    ) -> None:
        """``tokens`` [prompt] may grow to ``most_tokens``; ``runs`` of them are computed, and see ``shared`` chunks.

        ``capture`` makes the collector of KV for a sequence that computes chunks; such a sequence gives no logits. With
        ``probe``, the runs are those of a first pass, after which ``relink`` is called. ``refine`` makes the refinement
        of a policy that refines. ``logprobs`` gets the hidden states of the prompt's last tokens.
        """
        self._tokens = np.empty(most_tokens, dtype=np.int64)
        self._tokens[: len(tokens)] = tokens
        self._shared = tuple(shared)
        self._make_capture = capture
        self._refine = refine
        self._logprobs = logprobs
        self._begun = False
        self.prompt_length = len(tokens)
        self.length = len(tokens)
        self.prompt_slots: SlotRange | None = None
        """Holds the prompt's own tokens, once other answers share them."""

        self.held: SlotRange | None = None
        """Holds its own tokens, except for those in ``prompt_slots``."""

        self.capture: Capture | None = None
        self.probe = probe
        self.refinement: Refinement | None = None
        self.times_left = 0
        """The number of times that the sequence has left a step because a chunk's layer was late."""

        self._compute(runs)

    def _compute(self, runs: Sequence[Range]) -> None:
        """Have these runs of the prompt computed: their tokens are the sequence's own."""
        self._prompt_runs = tuple(runs)
        self._pending = list(runs)
        prompt = [np.arange(begin, end) for begin, end in runs]
        self._own = np.concatenate([*prompt, np.arange(self.prompt_length, self.most_tokens)])
        self._own_in_prompt = sum(end - begin for begin, end in runs)
        self._own_tokens: OwnTokens | None = None

    @property
    def own_length(self) -> int:
        """The number of slots that the sequence's own tokens take: those that it computes, prompt and generated."""
        return self._own_in_prompt + self.length - self.prompt_length

    @property
    def shared_length(self) -> int:
        """The number of its own tokens that lie in slots which other answers share."""
        return 0 if self.prompt_slots is None else self.prompt_slots.size

    @property
    def own_in_prompt(self) -> int:
        """The number of the prompt's tokens that are the sequence's own."""
        return self._own_in_prompt

    @property
    def most_own(self) -> int:
        """The most slots that the sequence's own tokens may take."""
        return len(self._own)

    @property
    def most_tokens(self) -> int:
        """The most tokens that prompt and answer may have together."""
        return len(self._tokens)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """All tokens so far, prompt and generated: [length]."""
        return self._tokens[: self.length]

    @property
    def computed(self) -> bool:
        """True if nothing is left to compute until a token is appended."""
        return not self._pending

    @property
    def decoding(self) -> bool:
        """True if only the token that was generated last is left to compute."""
        return self._pending == [(self.length - 1, self.length)] and self.length > self.prompt_length

    @property
    def prompt_in_place(self) -> bool:
        """True if the slots hold the KV of the whole prompt as it was linked."""
        if self.held is None or not self._begun or self.probe is not None:
            return False
        return not self._pending or self._pending[0][0] >= self.prompt_length

    @property
    def arriving(self) -> tuple[ArrivingKV, ...]:
        """The shared chunks' KV of which some layers have not arrived."""
        found = (chunk.kv for chunk in self._shared)
        return tuple(kv for kv in found if isinstance(kv, ArrivingKV) and not kv.complete)

    @property
    def lost(self) -> bool:
        """True if a shared chunk can no longer be loaded completely."""
        return any(kv.lost for kv in self.arriving)

    def relink(self, runs: Sequence[Range], refine: Callable[[], Refining] | None) -> None:
        """Compute these runs instead, after the first pass."""
        self.probe = None
        self._begun = refine is None
        self._refine = refine
        self._compute(runs)

    def append(self, token: int) -> None:
        """Append a generated token, which is computed next."""
        self._tokens[self.length] = token
        self._pending.append((self.length, self.length + 1))
        self.length += 1

    def fork(self) -> TokenSequence:
        """Return a sequence for the same prompt, with no generated tokens and no slots."""
        forked = TokenSequence(
            self.tokens[: self.prompt_length],
            self._prompt_runs,
            shared=self._shared,
            most_tokens=self.most_tokens,
            refine=self._refine,
        )
        forked.refinement = self.refinement
        return forked

    def adopt_prompt(self) -> None:
        """Mark the prompt as computed: its slots are another sequence's too, or were."""
        self._begun = True
        self._pending = [(self.prompt_length, self.length)] if self.length > self.prompt_length else []

    def restart(self) -> None:
        """Discard all computed KV, whose slots are gone, and begin again."""
        self._begun = False
        self.capture = None
        self._own_tokens = None
        self._pending = list(self._prompt_runs)
        if self.length > self.prompt_length:
            self._pending.append((self.prompt_length, self.length))

    def take(self, budget: int) -> tuple[list[Run], Sight]:
        """Return the next runs, of at most ``budget`` tokens in all, and what they see, and mark them as done.

        A prompt whose policy refines is taken whole and alone, since what it keeps depends on all of its tokens and on
        no others.
        """
        assert self.held is not None
        refining: Refining | None = None
        if not self._begun:
            self._begun = True
            self._own_tokens = None
            self.capture = None if self._make_capture is None else self._make_capture()
            if self._refine is not None:
                refining = self._refine()
                self.refinement = refining.refinement
                budget = self.prompt_length
        taken: list[Range] = []
        while self._pending and budget > 0:
            begin, end = self._pending[0]
            if refining is not None and begin >= self.prompt_length:
                break
            cut = min(end, begin + budget)
            taken.append((begin, cut))
            budget -= cut - begin
            if cut == end:
                self._pending.pop(0)
            else:
                self._pending[0] = (cut, end)
        wants_logits = self.computed and self.capture is None and self.probe is None
        runs = [
            Run(
                self.held.start + self._own_before(begin) - self.shared_length,
                begin,
                self._tokens[begin:end],
                wants_logits=wants_logits and (begin, end) == taken[-1],
                capture=self.capture,
                refinement=None if refining is None else refining.refinement,
                observer=self._observer(refining),
                logprobs=self._logprobs if self.probe is None else None,
                owner=self,
            )
            for begin, end in taken
        ]
        seen = self._own_before(taken[-1][1]) if taken else 0
        return runs, Sight(self._shared, self._spans(seen), self._own[:seen], self._visibility())

    def _spans(self, count: int) -> tuple[SlotSpan, ...]:
        """Return where the first ``count`` of its own tokens lie in the pool."""
        assert self.held is not None
        if self.prompt_slots is None:
            return (SlotSpan(self.held.start, count),)
        size = self.prompt_slots.size
        return SlotSpan(self.prompt_slots.start, size), SlotSpan(self.held.start, count - size)

    def _own_before(self, position: int) -> int:
        """Count the sequence's own tokens that stand before the position."""
        return int(np.searchsorted(self._own, position))

    def _visibility(self) -> OwnTokens:
        if self._own_tokens is None:
            dropped = () if self.refinement is None else self.refinement.dropped
            self._own_tokens = OwnTokens(self._own[: self._own_in_prompt], self._shared, dropped)
        return self._own_tokens

    def _observer(self, refining: Refining | None) -> Observer | None:
        if self.capture is not None:
            return self.capture.scores
        return self.probe if refining is None else refining.watch


class SequenceSlots:
    """Assigns slots to sequences, and notes which KV has to be copied for that. Nothing else changes
    ``TokenSequence.held`` and ``prompt_slots``."""

    def __init__(self, slots: int) -> None:
        self._allocator = SlotAllocator(slots)

    @property
    def used(self) -> int:
        """The number of slots that sequences hold."""
        return self._allocator.used

    def admit(self, sequence: TokenSequence, linked: TokenSequence | None = None) -> bool:
        """Give the sequence slots for its tokens, and a few more; False where there are too few. With ``linked``, a
        sequence for the same prompt whose KV is in place, the two share the prompt's slots."""
        computed = 0 if linked is None else linked.own_in_prompt
        sequence.held = self._allocator.allocate(_wanted(sequence) - computed)
        if sequence.held is None:
            return False
        if linked is not None:
            assert linked.held is not None
            if linked.prompt_slots is None:
                linked.prompt_slots = self._allocator.split(linked.held, computed)
            sequence.prompt_slots = self._allocator.share(linked.prompt_slots)
            sequence.adopt_prompt()
        return True

    def grow(self, sequence: TokenSequence) -> bool:
        """Make sure that the sequence holds slots for all of its tokens; False where there are too few."""
        assert sequence.held is not None
        shared = sequence.shared_length
        if sequence.held.size >= sequence.own_length - shared:
            return True
        grown = self._allocator.grow(sequence.held, _wanted(sequence) - shared)
        sequence.held = grown or sequence.held
        return grown is not None

    def hand_over(self, sequence: TokenSequence, heir: TokenSequence) -> None:
        """Give all slots of one sequence, in which the prompt's KV is in place, to another one for the same prompt."""
        heir.held, sequence.held = sequence.held, None
        heir.prompt_slots, sequence.prompt_slots = sequence.prompt_slots, None
        heir.adopt_prompt()

    def release(self, sequence: TokenSequence) -> None:
        """Take the sequence's slots back."""
        assert sequence.held is not None
        self._allocator.release(sequence.held)
        if sequence.prompt_slots is not None:
            self._allocator.release(sequence.prompt_slots)
        sequence.held = sequence.prompt_slots = None

    def take_moves(self) -> tuple[Move, ...]:
        """Return the copies of KV to make, in order, before anything is computed, and mark them as done."""
        return self._allocator.take_moves()

    def check_integrity(self, holders: Sequence[TokenSequence]) -> None:
        """Check that exactly these sequences hold slots, and that those which several of them hold know their number.
        Raises AssertionError otherwise."""
        self._allocator.check_integrity()
        assert all(sequence.held is not None for sequence in holders)
        ranges = [held for sequence in holders for held in (sequence.held, sequence.prompt_slots) if held is not None]
        assert {id(held): held.users for held in ranges} == Counter(map(id, ranges))
        assert sum({id(held): held.size for held in ranges}.values()) == self.used


def _wanted(sequence: TokenSequence) -> int:
    """Return the number of slots that all of the sequence's own tokens need now, and a few more."""
    return min(sequence.own_length + GROWTH, sequence.most_own)
