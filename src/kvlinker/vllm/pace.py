"""How much linking a step may hold while others decode, so that they keep theirs: learnt from how long steps take."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

SLOWDOWN = 1.4
LEAST_TOKENS = 16
PLACED_PER_COMPUTED = 16.0
"""Placed tokens that take as long as a computed one, as long as nothing is known of it."""

MOST_PLACED_PER_COMPUTED = 4096.0

SMOOTHING = 0.3
LEAST_SECONDS = 1e-6
PLAIN_STEPS = 16
MOST_SAVED = 8
MOST_OWED = 32
"""In steps without linking: the time that is saved for a request's own first step at most, and that is given back."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step does: tokens that linking ``placed`` and ``computed``, and those that vLLM ``scheduled``."""

    placed: float = 0.0
    computed: float = 0.0
    scheduled: int = 0

    @property
    def links(self) -> bool:
        return bool(self.placed or self.computed)


@dataclass(frozen=True, slots=True)
class _Plain:
    """A step without linking."""

    scheduled: int
    seconds: float


class StepPace:
    """Whoever decodes while prompts are linked waits ``slowdown`` times as long for a token, on average: every step
    earns some of the time that slices take.

    A slice takes as long as the rest of its step; but a pass has its fixed price, so that it has 16 tokens at least.
    """

    def __init__(
        self, most_tokens: int, *, slowdown: float = SLOWDOWN, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """``most_tokens``: of a step's linking, whatever was learnt."""
        self._most = most_tokens
        self._slowdown = slowdown
        self._clock = clock
        self._under_way: deque[tuple[StepWork, float]] = deque()  # with what was taken of the savings for it
        self._last_end: float | None = None
        self._plain: deque[_Plain] = deque(maxlen=PLAIN_STEPS)
        self._computed: float | None = None  # seconds per token
        self._placed: float | None = None
        self._saved = 0.0  # seconds that linking may take; less than 0: that others still have to get back

    @property
    def placed_per_computed(self) -> float:
        """Placed tokens that take as long as a computed one."""
        if self._placed is None or self._computed is None:
            return PLACED_PER_COMPUTED
        return min(max(self._computed / self._placed, 1.0), MOST_PLACED_PER_COMPUTED)

    @property
    def tokens(self) -> int:
        """That linking may compute in the step that is being planned."""
        if self._saved < 0:
            return 0
        least = min(LEAST_TOKENS, self._most)
        if not self._plain or self._computed is None:
            return least
        return max(least, min(self._most, int(self._plain_seconds / self._computed)))

    def may_end(self, tokens: float) -> bool:
        """Whether a request may be linked to its end, where so many are left: those that the request's own first step
        computes then are among them, for they keep others waiting, too. Time is saved for them, but not for ever."""
        if not self._plain or self._computed is None:
            return True
        return self._saved >= min(tokens * self._computed, MOST_SAVED * self._plain_seconds)

    def rest(self) -> None:
        """Nothing is to be linked: nothing is saved, either."""
        self._saved = min(self._saved, 0.0)

    def planned(self, work: StepWork) -> None:
        """Of the next step."""
        price = self._price(work) if work.scheduled else 0.0
        self._under_way.append((work, price))
        self._saved -= price

    def ended(self) -> None:
        """The oldest step is done. Steps follow each other closely as long as vLLM schedules something."""
        now = self._clock()
        work, price = self._under_way.popleft() if self._under_way else (StepWork(), 0.0)
        self._saved += price
        if work.scheduled and self._last_end is not None:
            self._learn(work, now - self._last_end)
        self._last_end = now if work.scheduled else None

    @property
    def _plain_seconds(self) -> float:
        return statistics.median(step.seconds for step in self._plain)

    def _price(self, work: StepWork) -> float:
        """Seconds that linking will take of a step, as far as is known."""
        if not self._plain:
            return 0.0
        computed = self._computed or self._plain_seconds / LEAST_TOKENS
        placed = self._placed or computed / PLACED_PER_COMPUTED
        return work.computed * computed + work.placed * placed

    def _learn(self, work: StepWork, seconds: float) -> None:
        if not work.links and not self._prefills(work):
            self._plain.append(_Plain(work.scheduled, seconds))
        if not self._plain:
            return
        extra = max(seconds - self._plain_seconds, LEAST_SECONDS)
        if not work.links:
            if self._prefills(work):
                self._computed = _smoothed(self._computed, extra / work.scheduled)
        elif not work.placed:
            self._computed = _smoothed(self._computed, extra / work.computed)
        elif not work.computed:
            self._placed = _smoothed(self._placed, extra / work.placed)
        earned = (self._slowdown - 1) * self._plain_seconds
        saved = self._saved + earned - (extra if work.links else 0.0)
        self._saved = max(-MOST_OWED * self._plain_seconds, min(saved, MOST_SAVED * self._plain_seconds))

    def _prefills(self, work: StepWork) -> bool:
        """Whether vLLM computes more in this step than tokens of answers."""
        if not self._plain:
            return False
        return work.scheduled >= LEAST_TOKENS + statistics.median(step.scheduled for step in self._plain)


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else (1 - SMOOTHING) * old + SMOOTHING * new
