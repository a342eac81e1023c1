"""A request's tokens in the engine: which of them are still to be computed, and which slots hold their KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlinker.embedded.batch import Capture, Placed, Run
from kvlinker.embedded.pool import Move, SlotAllocator, SlotRange
from kvlinker.embedded.scoring import LogprobCollector
from kvlinker.engine.observation import ChunkWatch, Observer, QuestionProbe
from kvlinker.linking.plan import Placement, Range
from kvlinker.linking.refinement import Refinement
from kvlinker.store.loading.arriving import KV, ArrivingKV

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
        placements: Sequence[tuple[Placement, KV]] = (),
        most_tokens: int,
        capture: Callable[[], Capture] | None = None,
        probe: QuestionProbe | None = None,
        refine: Callable[[], Refining] | None = None,
        logprobs: LogprobCollector | None = None,
    ) -> None:
        """``tokens`` [prompt] may grow to ``most_tokens``; ``runs`` of them are computed over the ``placements``.

        ``capture`` makes the collector of KV for a sequence that computes chunks; such a sequence gives no logits. With
        ``probe``, the runs are those of a first pass, after which ``relink`` is called. ``refine`` makes the refinement
        of a policy that refines. ``logprobs`` gets the hidden states of the prompt's last tokens.
        """
        self._tokens = np.empty(most_tokens, dtype=np.int64)
        self._tokens[: len(tokens)] = tokens
        self._prompt_runs = tuple(runs)
        self._placements = tuple(placements)
        self._make_capture = capture
        self._refine = refine
        self._logprobs = logprobs
        self._begun = False
        self._pending: list[Range] = list(runs)
        self.prompt_length = len(tokens)
        self.length = len(tokens)
        self.held: SlotRange | None = None
        self.capture: Capture | None = None
        self.probe = probe
        self.refinement: Refinement | None = None
        self.times_left = 0
        """The number of times that the sequence has left a step because a chunk's layer was late."""

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
        """The placements' KV of which some layers have not arrived."""
        return tuple(kv for _, kv in self._placements if isinstance(kv, ArrivingKV) and not kv.complete)

    @property
    def lost(self) -> bool:
        """True if a chunk to be placed can no longer be loaded completely."""
        return any(kv.lost for kv in self.arriving)

    def relink(self, runs: Sequence[Range], refine: Callable[[], Refining] | None) -> None:
        """Compute these runs after the first pass, over the KV that is already placed. For a policy that refines, the
        chunks are placed anew: the first pass has overwritten the last token's KV where a chunk ends the prompt."""
        self.probe = None
        self._begun = refine is None
        self._prompt_runs = tuple(runs)
        self._pending = list(runs)
        self._refine = refine

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
            placements=self._placements,
            most_tokens=self.most_tokens,
            refine=self._refine,
        )
        forked.refinement = self.refinement
        return forked

    def adopt_prompt(self) -> None:
        """Mark the prompt as computed: the slots hold a copy of its KV from another sequence."""
        self._begun = True
        self._pending = [(self.prompt_length, self.length)] if self.length > self.prompt_length else []

    def restart(self) -> None:
        """Discard all computed KV, whose slots are gone, and begin again with placing and computing."""
        self._begun = False
        self.capture = None
        self._pending = list(self._prompt_runs)
        if self.length > self.prompt_length:
            self._pending.append((self.prompt_length, self.length))

    def take(self, budget: int) -> tuple[list[Run], list[Placed]]:
        """Return the next runs, of at most ``budget`` tokens in all, and the placements before them, and mark them as
        done.

        A prompt whose policy refines is taken whole and alone, since what it keeps depends on all of its tokens and on
        no others.
        """
        assert self.held is not None
        slot = self.held.start
        placed: list[Placed] = []
        refining: Refining | None = None
        if not self._begun:
            self._begun = True
            placed = [self._to_place(slot, *entry) for entry in self._placements]
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
                slot,
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
        return runs, placed

    def _observer(self, refining: Refining | None) -> Observer | None:
        if self.capture is not None:
            return self.capture.scores
        return self.probe if refining is None else refining.watch

    def _to_place(self, slot: int, placement: Placement, kv: KV) -> Placed:
        return Placed(
            kv,
            placement.first,
            placement.last,
            slot=slot + placement.start + placement.first,
            rotary_start=placement.rotary_start + placement.first,
            owner=self,
        )


class SequenceSlots:
    """Assigns slots to sequences, one range each, and notes which KV has to be copied for that. Nothing else changes
    ``TokenSequence.held``."""

    def __init__(self, slots: int) -> None:
        self._allocator = SlotAllocator(slots)

    @property
    def used(self) -> int:
        """The number of slots that sequences hold."""
        return self._allocator.used

    def admit(self, sequence: TokenSequence, linked: TokenSequence | None = None) -> bool:
        """Give the sequence slots for its tokens, and a few more; False where there are too few. With ``linked``, a
        sequence for the same prompt whose KV is in place, the prompt's KV is copied from there."""
        sequence.held = self._allocator.allocate(_wanted(sequence))
        if sequence.held is None:
            return False
        if linked is not None:
            assert linked.held is not None
            self._allocator.copy(linked.held.start, sequence.held.start, sequence.prompt_length)
            sequence.adopt_prompt()
        return True

    def grow(self, sequence: TokenSequence) -> bool:
        """Make sure that the sequence holds slots for all of its tokens; False where there are too few."""
        assert sequence.held is not None
        if sequence.held.size >= sequence.length:
            return True
        grown = self._allocator.grow(sequence.held, _wanted(sequence))
        sequence.held = grown or sequence.held
        return grown is not None

    def hand_over(self, sequence: TokenSequence, heir: TokenSequence) -> None:
        """Give all slots of one sequence, in which the prompt's KV is in place, to another one for the same prompt."""
        heir.held, sequence.held = sequence.held, None
        heir.adopt_prompt()

    def release(self, sequence: TokenSequence) -> None:
        """Take the sequence's slots back."""
        assert sequence.held is not None
        self._allocator.release(sequence.held)
        sequence.held = None

    def take_moves(self) -> tuple[Move, ...]:
        """Return the copies of KV to make, in order, before anything is computed, and mark them as done."""
        return self._allocator.take_moves()

    def check_integrity(self, holders: Sequence[TokenSequence]) -> None:
        """Check that exactly these sequences hold slots, a range of its own each. Raises AssertionError otherwise."""
        self._allocator.check_integrity()
        held = [sequence.held for sequence in holders if sequence.held is not None]
        assert len({id(one) for one in held}) == len(held) == len(holders)
        assert sum(one.size for one in held) == self.used


def _wanted(sequence: TokenSequence) -> int:
    """Return the number of slots to give the sequence now."""
    return min(sequence.length + GROWTH, sequence.most_tokens)
