"""Computes confidence intervals of means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvlinker.service.audit.statistics import Interval

LEVEL = 0.95
"""The confidence of intervals, as those of shares have it."""

RESAMPLES = 2000
"""The samples drawn for an interval: Efron and Tibshirani (1993) ask for 1000 at the least where
bounds are percentiles."""


def mean_interval(values: Sequence[float]) -> Interval:
    """Bound the mean of ``values`` by the percentile bootstrap with 2000 resamples.

    Resamples are always the same, so that policies that answered the same examples are compared on
    the same draws. Values that are all alike, be it one alone, have an interval without width.
    """
    sample = np.asarray(values, dtype=np.float64)
    if (sample == sample[0]).all():
        return Interval(float(sample[0]), float(sample[0]))
    draw = np.random.default_rng(0)
    # One resample at a time: all of them would take gigabytes for the tokens of a long text.
    means = [draw.choice(sample, len(sample)).mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))
