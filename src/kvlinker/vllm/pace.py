"""How much linking a step may hold while others decode, so that they keep theirs: learnt from how long steps take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

SMOOTHING = 0.2
LEAST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that is under way: what it computes of orders, and whether it computes anything else."""

    cost: float
    busy: bool


class StepPace:
    """Linking takes as long as the rest of its step, and every second step has none: whoever decodes meanwhile waits
    half as long again for a token, on average. A pass has its fixed price, however: it has 16 tokens at least."""

    def __init__(self, most_tokens: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """``most_tokens``: of a step's linking, whatever was learnt."""
        self._most = most_tokens
        self._clock = clock
        self._under_way: deque[_Step] = deque()
        self._last_end: float | None = None
        self._last_linked = False
        self._plain_seconds: float | None = None
        self._tokens_per_second: float | None = None

    @property
    def budget(self) -> int:
        """Tokens that linking may compute in a step beside others."""
        if self._plain_seconds is None or self._tokens_per_second is None:
            return min(LEAST_TOKENS, self._most)
        return max(min(LEAST_TOKENS, self._most), min(self._most, int(self._tokens_per_second * self._plain_seconds)))

    def next_budget(self) -> int:
        """Of the step that is being planned."""
        return 0 if self._last_linked else self.budget

    def planned(self, *, cost: float, busy: bool) -> None:
        """The next step links ``cost`` tokens; ``busy``: it computes others', too."""
        self._under_way.append(_Step(cost, busy))
        self._last_linked = busy and cost > 0

    def ended(self) -> None:
        """The oldest step is done. Steps follow each other closely as long as they are busy."""
        now = self._clock()
        step = self._under_way.popleft() if self._under_way else None
        if step is not None and step.busy and self._last_end is not None:
            self._learn(step.cost, now - self._last_end)
        self._last_end = now if step is not None and step.busy else None

    def _learn(self, cost: float, seconds: float) -> None:
        if not cost:
            self._plain_seconds = _smoothed(self._plain_seconds, seconds)
        elif self._plain_seconds is not None and seconds > self._plain_seconds:
            self._tokens_per_second = _smoothed(self._tokens_per_second, cost / (seconds - self._plain_seconds))


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else (1 - SMOOTHING) * old + SMOOTHING * new
