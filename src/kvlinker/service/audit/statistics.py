"""Statistics of shares of agreeing answers: exact intervals, and tests that may be evaluated after
every answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

LEVEL = 0.95
"""The confidence of intervals."""

BASELINE_SAMPLES = 100
"""The first answers, which say how high a share is as long as nothing drifts."""

FALSE_ALARM_SAMPLES = 1000
"""The fewest answers between two false alarms of ``DriftDetector``, on average."""

_HIGHER = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
_LOWER = (0.0, 0.1, 0.25, 0.5, 0.75)


class Interval(NamedTuple):
    """The bounds of a 95% confidence interval, in the unit of the measurement."""

    low: float
    high: float


def clopper_pearson(successes: int, trials: int) -> Interval:
    """Bound a probability by ``successes`` out of ``trials`` with the exact interval of Clopper and
    Pearson (1934), which covers it in at least 95% of all cases, however few trials there are.
    Without trials it is [0, 1]."""
    tail = (1 - LEVEL) / 2
    return Interval(
        _rate_of(successes, trials, tail) if successes else 0.0,
        _rate_of(successes + 1, trials, 1 - tail) if successes < trials else 1.0,
    )


def _rate_of(least: int, trials: int, chance: float) -> float:
    """Return the rate at which the chance of ``least`` successes or more is ``chance``, by
    bisection."""
    counts = np.arange(1, trials + 1)
    choices = np.cumsum(np.log((trials + 1 - counts) / counts))[least - 1 :]
    counts = counts[least - 1 :]
    low, high = 0.0, 1.0
    for _ in range(np.finfo(np.float64).nmant):
        rate = (low + high) / 2
        logs = choices + counts * math.log(rate) + (trials - counts) * math.log1p(-rate)
        if np.exp(logs).sum() < chance:
            low = rate
        else:
            high = rate
    return (low + high) / 2


class RateTest:
    """Gathers evidence against the hypothesis that successes come at a rate on one side of a bound.

    It is a sequential probability ratio test (Wald 1945) against a mixture of alternatives (Robbins
    1970). While the hypothesis is true, the chance that ``evidence`` ever reaches 1/α is at most α,
    however often one looks (Ville 1939).
    """

    def __init__(self, bound: float, failure_rates: Sequence[float]) -> None:
        """Test whether the rate is ``bound``, between 0 and 1, against these ``failure_rates``, all
        of which are on the other side of ``1 - bound``."""
        self._steps = tuple(_log_ratios(bound, rate) for rate in failure_rates)
        self.logs = [-math.log(len(failure_rates))] * len(failure_rates)
        """The logarithm of how much better each alternative explains the answers so far, times its
        weight."""

    @classmethod
    def falls_below(cls, bound: float) -> Self:
        """Test the hypothesis that the rate is at least ``bound``: evidence grows where it is
        below."""
        return cls(bound, higher_failure_rates(bound))

    @classmethod
    def exceeds(cls, bound: float) -> Self:
        """Test the hypothesis that the rate is at most ``bound``: evidence grows where it is
        above."""
        return cls(bound, [share * (1 - bound) for share in _LOWER])

    @property
    def evidence(self) -> float:
        """The factor by which the alternatives explain the answers so far better than the bound
        does."""
        return math.exp(min(_log_sum(self.logs), 700.0))

    def note(self, success: bool) -> None:
        """Take another answer into account."""
        self.logs = [log + step[success] for log, step in zip(self.logs, self._steps, strict=True)]


@dataclass(frozen=True, slots=True)
class RepeatedTestState:
    """The state of a ``RepeatedTest``."""

    number: int
    """The number of the present test, from 1 on."""

    samples: int
    successes: int
    logs: tuple[float, ...]
    """The logarithms of the present test."""


class RepeatedTest:
    """Tests one hypothesis again and again, so that it is refuted soon after it ceases to be true,
    however long it was.

    A test whose evidence has fallen to ``error`` is given up and another begins. The k-th refutes
    the hypothesis where its evidence reaches k (k + 1) / ``error``. The chances of error of all of
    them sum up to ``error``: it is the chance, at most, that a hypothesis that stays true is ever
    refuted.
    """

    def __init__(self, begin: Callable[[], RateTest], error: float) -> None:
        """``begin`` makes a test. ``error`` is a probability."""
        self._begin = begin
        self._error = error
        self._number = 0
        self._start()

    def _start(self) -> None:
        self._test = self._begin()
        self._number += 1
        self.samples = 0
        """The answers since the present test began."""

        self.successes = 0
        """The trials that are successes."""

    @property
    def evidence(self) -> float:
        """The evidence of the present test."""
        return self._test.evidence

    @property
    def state(self) -> RepeatedTestState:
        """The current state."""
        return RepeatedTestState(self._number, self.samples, self.successes, tuple(self._test.logs))

    def restore(self, state: RepeatedTestState) -> None:
        """Go on from a state of a test of the same hypothesis."""
        self._number, self.samples, self.successes = state.number, state.samples, state.successes
        self._test.logs = list(state.logs)

    @property
    def refuted(self) -> bool:
        """True if the present test refutes the hypothesis."""
        return self.evidence >= self._number * (self._number + 1) / self._error

    def note(self, success: bool) -> None:
        """Take another answer into account."""
        if self.evidence <= self._error:
            self._start()
        self._test.note(success)
        self.samples += 1
        self.successes += success


@dataclass(slots=True)
class DriftDetector:
    """Notices when successes become rarer than they were in the first hundred answers.

    It is a mixture of e-CUSUM detectors (Shin, Ramdas and Rinaldo 2024, after Page 1954) against
    the lower end of the exact interval of those first answers: as long as the rate is not below
    that, alarms are at least ``FALSE_ALARM_SAMPLES`` answers apart on average. After an alarm it
    learns the new rate and begins again. Its fields are its state, as it is written.
    """

    alarms: int = 0
    """The number of times that successes have become rarer."""

    seen: int = 0
    """The answers since the last alarm."""

    successes: int = 0

    bound: float | None = None
    """The rate that is taken for the usual one; None while it is learnt."""

    logs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a state that no answers lead to."""
        learnt = self.seen >= BASELINE_SAMPLES
        if (self.bound is not None) != learnt or len(self.logs) != learnt * len(_HIGHER):
            raise ValueError("A drift detector's state is damaged.")

    def note(self, success: bool) -> bool:
        """Take another answer into account; return whether it raises an alarm."""
        self.seen += 1
        self.successes += success
        if self.bound is None:
            if self.seen == BASELINE_SAMPLES:
                self.bound = max(clopper_pearson(self.successes, self.seen).low, 1e-3)
                self.logs = (0.0,) * len(_HIGHER)
            return False
        rates = higher_failure_rates(self.bound)
        self.logs = tuple(
            max(0.0, log) + _log_ratios(self.bound, rate)[success]
            for log, rate in zip(self.logs, rates, strict=True)
        )
        if _log_sum(self.logs) - math.log(len(self.logs)) < math.log(FALSE_ALARM_SAMPLES):
            return False
        self.alarms += 1
        self.seen, self.successes, self.bound, self.logs = 0, 0, None, ()
        return True


def higher_failure_rates(bound: float) -> list[float]:
    """Return rates of failure above ``1 - bound``, in geometric steps up to 1."""
    return [(1 - bound) ** (1 - part) for part in _HIGHER]


def _log_ratios(bound: float, failure_rate: float) -> tuple[float, float]:
    """Return the logarithms of how much likelier a failure, and a success, is at ``failure_rate``
    than at ``bound``."""
    success = math.log((1 - failure_rate) / bound)
    return (math.log(failure_rate / (1 - bound)) if failure_rate else -math.inf), success


def _log_sum(logs: Sequence[float]) -> float:
    highest = max(logs)
    if highest == -math.inf:
        return highest
    return highest + math.log(sum(math.exp(log - highest) for log in logs))
