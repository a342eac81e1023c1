"""Continuous batching: which runs of which sequences the next step computes, and who holds the pool's slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvlinker.embedded.batch import Batch
from kvlinker.embedded.pool import SlotAllocator
from kvlinker.embedded.sequence import Sequence

GROWTH = 64
"""Slots that a sequence gets ahead of its need, so that it seldom has to grow."""

MoveSlots = Callable[[int, int, int], None]
"""(from, to, size): copies the pool's KV."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to compute now, and for which sequences (in the order of their runs in the batch)."""

    batch: Batch
    sequences: tuple[Sequence, ...]


class Scheduler:
    """First come, first served, under a token budget per step.

    Decoding sequences come first in every step; what is left of the budget goes to prefills and links in order of
    admission, cut where it ends, and then to chunks. Chunks wait in a queue of their own: one at a time is computed
    whatever else waits, more of them only while nobody waits for an answer. When the pool is full, the sequence
    admitted last gives its slots up and starts again later.
    """

    def __init__(self, allocator: SlotAllocator, move: MoveSlots, *, max_step_tokens: int, max_running: int) -> None:
        self._allocator = allocator
        self._move = move
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running
        self._waiting: deque[Sequence] = deque()
        self._waiting_chunks: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        """Requests in the queue; chunks do not count."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests and chunks under way."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        return not (self._running or self._waiting or self._waiting_chunks)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It must fit the pool alone: ``most_tokens`` ≤ slots."""
        self._queue_of(sequence).append(sequence)

    def promote(self, sequence: Sequence) -> None:
        """Somebody waits for this chunk's KV: it comes first among the chunks that wait."""
        if sequence in self._waiting_chunks:
            self._waiting_chunks.remove(sequence)
            self._waiting_chunks.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Drop a sequence wherever it is, and free its slots at once. Unknown sequences are ignored."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._release(sequence)
        elif sequence in self._queue_of(sequence):
            self._queue_of(sequence).remove(sequence)

    def schedule(self) -> Step | None:
        """The next step; None when there is nothing to compute."""
        self._grow_running()
        self._admit()
        ordered = sorted(self._running, key=_rank)
        budget = self._max_step_tokens
        runs, placed, sequences = [], [], []
        for sequence in ordered:
            if budget <= 0:
                break
            taken, to_place = sequence.take(budget)
            if taken:
                budget -= sum(len(run.tokens) for run in taken)
                runs += taken
                placed += to_place
                sequences.append(sequence)
        if not runs:
            return None
        return Step(Batch(tuple(runs), tuple(placed)), tuple(sequences))

    def check_integrity(self) -> None:
        """Raises AssertionError unless exactly the running sequences hold slots, enough of them each."""
        self._allocator.check_integrity()
        assert self._allocator.used == sum(s.held.size for s in self._running if s.held is not None)
        assert all(s.held is not None for s in self._running)
        assert all(s.held is None for s in (*self._waiting, *self._waiting_chunks))

    def _grow_running(self) -> None:
        """Give every running sequence room for the tokens it has; the last admitted make room when there is none."""
        for sequence in list(self._running):
            while sequence in self._running and not self._has_room(sequence):
                self._preempt(self._running[-1])

    def _has_room(self, sequence: Sequence) -> bool:
        held = sequence.held
        assert held is not None
        if held.size >= sequence.length:
            return True
        size = self._wanted(sequence)
        if self._allocator.extend(held, size):
            return True
        if self._allocator.free >= size - held.size:
            self._compact()
            if self._allocator.extend(held, size):
                return True
        moved = self._allocator.allocate(size)
        if moved is None:
            return False
        self._move(held.start, moved.start, held.size)
        self._allocator.release(held)
        sequence.held = moved
        return True

    def _admit(self) -> None:
        if not any(sequence.capture is not None for sequence in self._running):
            self._admit_from(self._waiting_chunks, at_most=1)
        self._admit_from(self._waiting, at_most=len(self._waiting))
        if not self._waiting:
            self._admit_from(self._waiting_chunks, at_most=len(self._waiting_chunks))

    def _admit_from(self, queue: deque[Sequence], *, at_most: int) -> None:
        for _ in range(at_most):
            if not queue or len(self._running) >= self._max_running:
                return
            size = self._wanted(queue[0])
            held = self._allocator.allocate(size)
            if held is None and self._allocator.free >= size:
                self._compact()
                held = self._allocator.allocate(size)
            if held is None:
                return
            sequence = queue.popleft()
            sequence.held = held
            self._running.append(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        sequence.restart()
        self._queue_of(sequence).appendleft(sequence)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        if sequence.held is not None:
            self._allocator.release(sequence.held)
            sequence.held = None

    def _queue_of(self, sequence: Sequence) -> deque[Sequence]:
        return self._waiting if sequence.capture is None else self._waiting_chunks

    def _compact(self) -> None:
        for source, target, size in self._allocator.compact():
            self._move(source, target, size)

    @staticmethod
    def _wanted(sequence: Sequence) -> int:
        return min(sequence.length + GROWTH, sequence.most_tokens)


def _rank(sequence: Sequence) -> int:
    """Decoding before prefills and links, these before chunks."""
    if sequence.decoding:
        return 0
    return 1 if sequence.capture is None else 2
