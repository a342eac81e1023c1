"""Limits how much linking steps do while others decode: a token bucket of seconds, with prices that
are learnt from steps."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

SLOWDOWN = 1.35
"""The factor by which linking one request lengthens the time between the tokens of requests that
decode, on average."""

MOST_WAITING = 8
"""The most requests waiting to be linked that lengthen this time further."""

LEAST_TOKENS = 16
"""The fewest tokens that a slice computes: each pass has a fixed cost."""

COMPUTED_PER_STEP = 16.0
"""The computed tokens that take as long as a step without linking, until measured."""

PLACED_PER_COMPUTED = 16.0
"""The placed tokens that take as long as a computed one, until measured."""

MOST_PLACED_PER_COMPUTED = 4096.0
"""The most placed tokens that count as one computed token, however the measurements came out."""

SMOOTHING = 0.3
"""The weight of a new measurement against all earlier ones."""

LEAST_SECONDS = 1e-6
"""The least seconds that linking is taken to add to a step, which keeps prices above zero."""

PLAIN_STEPS = 16
"""The most steps without linking that are remembered."""

PLAIN_AGE = 128
"""The number of steps after which a step without linking is forgotten, once there is a newer
one."""

MEASURED_EVERY = 32
"""The number of steps after which linking pauses, for as long as it takes to measure a step without
it."""

PAUSE = 2
"""The most steps of such a pause. In the first one, prompts that were linked before it may still be
prefilled."""

CAPACITY = 8
"""The most time in the bucket, in steps without linking per request that waits: it is saved for
requests' own first steps."""

MOST_OWED = 32
"""The most time that the bucket owes, in steps without linking: what took longer than was expected
is taken afterwards, and more than that is forgotten."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step, in tokens."""

    placed: float = 0.0
    computed: float = 0.0
    """The tokens that linking computes."""

    prefilled: int = 0
    """The prompt tokens that vLLM computes itself."""

    busy: bool = True
    """True if vLLM computes anything in the step."""

    @property
    def links(self) -> bool:
        """True if anything is linked in the step."""
        return bool(self.placed or self.computed)


class TransferThrottle:
    """Holds linking back so that requests that decode meanwhile wait ``target_seconds`` for a
    token, on average, while one request waits to be linked.

    It is a token bucket of seconds. Every step adds ``slowdown`` - 1 times the seconds of a step
    without linking, and linking takes out the seconds by which it lengthens a step: those of
    slices, and of the first steps of the requests that they are for. There is no slice while the
    bucket owes. A slice takes as long as the rest of its step, if that is enough for
    ``LEAST_TOKENS``.

    Where several requests wait, every step adds as many times as much, and a slice takes as many
    times as long: a second of linking delays all who decode and advances all who wait, so that the
    more wait, the more of it is worth its price. The slices of several are computed in one pass,
    whose fixed cost they share.
    """

    def __init__(
        self,
        most_tokens: int,
        *,
        slowdown: float = SLOWDOWN,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``most_tokens`` is the most that a step links, whatever was measured. ``clock`` returns
        seconds."""
        self._most = most_tokens
        self._slowdown = slowdown
        self._clock = clock
        self._under_way: deque[tuple[StepWork, float]] = deque()  # with what was taken out for it
        self._last_end: float | None = None
        self._plain: deque[tuple[int, float]] = deque(
            maxlen=PLAIN_STEPS
        )  # numbers of steps that decode alone, seconds
        self._steps = 0  # in which vLLM computed anything
        self._computed: float | None = None  # seconds per token
        self._placed: float | None = None  # seconds per token
        self._bucket = 0.0  # seconds that linking may take; less than 0: that it owes
        self._waiting = 1

    @property
    def target_seconds(self) -> float | None:
        """The seconds that others wait for a token while one prompt is linked, on average; None
        until measured."""
        return self._slowdown * self._plain_seconds if self._plain else None

    @property
    def tokens(self) -> float:
        """The number of tokens that linking may compute in the step that is being planned."""
        if self._bucket < 0 or self._pauses:
            return 0
        least = min(LEAST_TOKENS, self._most)
        if not self._plain:
            return least
        return max(least, min(self._most, int(self._share / self._computed_price)))

    @property
    def placed_per_computed(self) -> float:
        """The number of placed tokens that take as long as a computed one."""
        if not self._plain:
            return PLACED_PER_COMPUTED
        return min(max(self._computed_price / self._placed_price, 1.0), MOST_PLACED_PER_COMPUTED)

    def may_end(self, tokens: float) -> bool:
        """Return whether a request with ``tokens`` left may be linked to its end. ``tokens``
        include those of the request's own first step, which delays others, too. Saved time counts
        up to a limit."""
        return not self._plain or self._bucket >= self._reserve(tokens)

    def spend(self, tokens: float) -> None:
        """Reserve time for a request's own first step, which will compute ``tokens``."""
        if self._plain:
            self._bucket -= self._reserve(tokens)

    def expect(self, waiting: int) -> None:
        """Note how many requests wait to be linked."""
        self._waiting = min(max(waiting, 1), MOST_WAITING)

    def idle(self) -> None:
        """Empty the bucket, since no request is to be linked. Owed time stays owed."""
        self._bucket = min(self._bucket, 0.0)

    def note_plan(self, work: StepWork) -> None:
        """Note the work of the next step."""
        price = self._price(work) if work.busy else 0.0
        self._under_way.append((work, price))
        self._bucket -= price

    def note_end(self) -> None:
        """Note that the oldest step is done. Steps follow each other closely as long as vLLM
        computes something."""
        now = self._clock()
        work, price = self._under_way.popleft() if self._under_way else (StepWork(busy=False), 0.0)
        self._bucket += price
        self._steps += work.busy
        if work.busy and self._last_end is not None:
            self._learn(work, now - self._last_end)
        self._last_end = now if work.busy else None

    @property
    def _plain_seconds(self) -> float:
        return statistics.median(seconds for _, seconds in self._plain)

    @property
    def _pauses(self) -> bool:
        """True in the steps that are kept free of linking, to be measured."""
        since = self._steps - (self._plain[-1][0] if self._plain else 0)
        return since % (MEASURED_EVERY + PAUSE) >= MEASURED_EVERY

    @property
    def _share(self) -> float:
        """The seconds of a step without linking, once for each request that waits."""
        return self._waiting * self._plain_seconds

    @property
    def _computed_price(self) -> float:
        return self._computed or self._plain_seconds / COMPUTED_PER_STEP

    @property
    def _placed_price(self) -> float:
        return self._placed or self._computed_price / PLACED_PER_COMPUTED

    def _reserve(self, tokens: float) -> float:
        return min(tokens * self._computed_price, CAPACITY * self._share)

    def _price(self, work: StepWork) -> float:
        """Return the seconds that linking will take of a step, as far as is known."""
        return (
            work.computed * self._computed_price + work.placed * self._placed_price
            if self._plain
            else 0.0
        )

    def _learn(self, work: StepWork, seconds: float) -> None:
        if not work.links and not work.prefilled:
            self._plain.append((self._steps, seconds))
            while self._plain[0][0] < self._steps - PLAIN_AGE:
                self._plain.popleft()
        if not self._plain:
            return
        extra = max(seconds - self._plain_seconds, LEAST_SECONDS)
        if work.links and work.prefilled:
            extra = max(extra - work.prefilled * self._computed_price, LEAST_SECONDS)
        elif work.prefilled:
            self._computed = _smooth(self._computed, extra / work.prefilled)
        elif work.computed and not work.placed:
            self._computed = _smooth(self._computed, extra / work.computed)
        elif work.placed and not work.computed:
            self._placed = _smooth(self._placed, extra / work.placed)
        level = self._bucket + (self._slowdown - 1) * self._share - (extra if work.links else 0.0)
        self._bucket = max(-MOST_OWED * self._plain_seconds, min(level, CAPACITY * self._share))


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else (1 - SMOOTHING) * old + SMOOTHING * new
