"""What scattered points show: means in bins, lines through zero, and correlations with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.research.evaluation.bootstrap import LEVEL, Interval, mean_interval
from kvlinker.research.evaluation.correlation import spearman

RESAMPLES = 500


@dataclass(frozen=True, slots=True)
class Correlation:
    """Spearman's rank correlation of ``n`` points; ``value`` is None where one of the two never changes."""

    n: int
    value: float | None
    interval: Interval

    def __str__(self) -> str:
        if self.value is None:
            return f"not defined (n = {self.n})"
        shown = f"{self.value:.2f} [{self.interval.low:.2f}, {self.interval.high:.2f}]"
        return shown if self.interval.low > 0 or self.interval.high < 0 else f"{shown} (no clear effect)"


def correlation(
    first: Sequence[float], second: Sequence[float], groups: Sequence[int], *, seed: int = 0
) -> Correlation:
    """With a 95% percentile bootstrap that draws whole ``groups``: points of one group are not independent."""
    points, members = np.array([first, second], dtype=np.float64), np.asarray(groups)
    value = spearman(*points) if len(members) else None
    if value is None:
        return Correlation(len(members), None, Interval(0.0, 0.0))
    of_group = [np.flatnonzero(members == group) for group in np.unique(members)]
    generator = np.random.default_rng(seed)
    drawn = []
    for _ in range(RESAMPLES):
        chosen = np.concatenate([of_group[index] for index in generator.integers(0, len(of_group), len(of_group))])
        resampled = spearman(*points[:, chosen])
        drawn.append(0.0 if resampled is None else resampled)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Correlation(len(members), value, Interval(float(low), float(high)))


@dataclass(frozen=True, slots=True)
class Bin:
    """Mean ``x`` and ``y`` of ``n`` points, with the confidence interval of the mean ``y``."""

    x: float
    y: float
    interval: Interval
    n: int


def binned(x: Sequence[float], y: Sequence[float], bins: int) -> list[Bin]:
    """At most ``bins`` bins of about equally many points, ascending in ``x``; equal x are never parted."""
    across, up = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if not len(across):
        return []
    edges = np.unique(np.quantile(across, np.linspace(0, 1, bins + 1)))
    place = np.clip(np.searchsorted(edges, across, side="right") - 1, 0, max(len(edges) - 2, 0))
    found = []
    for index in np.unique(place):
        mine = place == index
        values = up[mine].tolist()
        found.append(Bin(float(across[mine].mean()), float(up[mine].mean()), mean_interval(values), len(values)))
    return found


@dataclass(frozen=True, slots=True)
class Line:
    """y = ``slope`` · x. ``r2`` = 1 - Σ(y - slope·x)² / Σ(y - ȳ)²: below 0, the mean alone fits better; None where y
    never changes."""

    slope: float
    r2: float | None


def line_through_zero(x: Sequence[float], y: Sequence[float]) -> Line:
    """Least squares without an intercept; slope 0 where all x are 0."""
    across, up = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    size = float(across @ across)
    slope = float(across @ up) / size if size else 0.0
    spread = float(((up - up.mean()) ** 2).sum()) if len(up) else 0.0
    return Line(slope, 1 - float(((up - slope * across) ** 2).sum()) / spread if spread else None)


def cumulative_share(values: NDArray[np.floating], shares: Sequence[float]) -> NDArray[np.float64]:
    """What the highest ``shares`` (0 to 1) of the ``values`` [n], none negative, hold of their sum; between whole
    values, in proportion. Where all are 0, their share of n."""
    ordered = np.sort(values.astype(np.float64))[::-1]
    held = np.concatenate([[0.0], np.cumsum(ordered)])
    if not held[-1]:
        return np.asarray(shares, dtype=np.float64)
    reached: NDArray[np.float64] = np.interp(np.asarray(shares) * len(values), np.arange(len(held)), held / held[-1])
    return reached
