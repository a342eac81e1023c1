"""Computes rank correlations and tests with scipy, for the papers' figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvlinker.quality.libraries import bench_library
from kvlinker.service.audit.statistics import LEVEL, Interval

CORRELATION_RESAMPLES = 500
"""The resamples of the bootstrap of a correlation. Chosen by hand."""


def spearman(first: ArrayLike, second: ArrayLike) -> float | None:
    """Return Spearman's rank correlation of two samples [n], equal values sharing their mean rank.

    None where it is not defined: for fewer than two values, and where all values of a sample are
    equal.
    """
    samples = [np.asarray(sample, dtype=np.float64) for sample in (first, second)]
    if any(len(np.unique(sample)) < 2 for sample in samples):
        return None
    return float(bench_library("scipy.stats").spearmanr(*samples).statistic)


@dataclass(frozen=True, slots=True)
class Correlation:
    """Spearman's rank correlation of ``n`` points with its 95% confidence interval."""

    n: int
    """Number of points."""
    value: float | None
    """The correlation, from -1 to 1; None where one of the two samples never changes."""
    interval: Interval

    def __str__(self) -> str:
        if self.value is None:
            return f"not defined (n = {self.n})"
        shown = f"{self.value:.2f} [{self.interval.low:.2f}, {self.interval.high:.2f}]"
        return (
            shown
            if self.interval.low > 0 or self.interval.high < 0
            else f"{shown} (no clear effect)"
        )


def grouped_correlation(
    first: Sequence[float], second: Sequence[float], groups: Sequence[int], *, seed: int = 0
) -> Correlation:
    """Correlate two samples [n] by rank, with an interval from a percentile bootstrap over whole
    ``groups`` [n].

    Points of one group, such as the chunks of one example, are not independent: so 500 resamples
    draw groups. A resample whose correlation is not defined counts as 0.
    """
    points, members = np.array([first, second], dtype=np.float64), np.asarray(groups)
    value = spearman(*points)
    if value is None:
        return Correlation(len(members), None, Interval(0.0, 0.0))
    points_of = [np.flatnonzero(members == group) for group in np.unique(members)]
    if len(points_of) == 1:
        return Correlation(len(members), value, Interval(value, value))

    def correlation_of(drawn: NDArray[np.int64]) -> float:
        return spearman(*points[:, np.concatenate([points_of[group] for group in drawn])]) or 0.0

    found = bench_library("scipy.stats").bootstrap(
        (np.arange(len(points_of)),),
        correlation_of,
        n_resamples=CORRELATION_RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        vectorized=False,
        rng=np.random.default_rng(seed),
    )
    low, high = found.confidence_interval
    return Correlation(len(members), value, Interval(float(low), float(high)))


def mann_whitney(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided p of the Mann-Whitney U test, in its normal approximation: how probable
    it is that two samples of one distribution differ as much as these do."""
    if len({*first, *second}) == 1:
        return 1.0
    test = bench_library("scipy.stats").mannwhitneyu(
        first, second, use_continuity=False, method="asymptotic"
    )
    return float(test.pvalue)
