"""Computes confidence intervals with scipy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlinker.quality.libraries import bench_library
from kvlinker.service.audit.statistics import Interval

LEVEL = 0.95
"""The confidence level of all intervals."""

MEAN_RESAMPLES = 2000
"""The resamples of the bootstrap of a mean. Chosen by hand."""


def mean_interval(values: Sequence[float]) -> Interval:
    """Bound the mean of ``values`` by the percentile bootstrap (``scipy.stats.bootstrap``) with
    2000 resamples.

    Resamples are always the same, so that policies that answered the same examples are compared on
    the same draws. Values that are all alike, be it one alone, have an interval without width.
    """
    sample = np.asarray(values, dtype=np.float64)
    if (sample == sample[0]).all():
        return Interval(float(sample[0]), float(sample[0]))
    return percentile_bootstrap(sample, np.mean, resamples=MEAN_RESAMPLES, seed=0, vectorized=True)


def percentile_bootstrap(
    sample: NDArray[Any],
    statistic: Callable[..., Any],
    *,
    resamples: int,
    seed: int,
    vectorized: bool,
) -> Interval:
    """Bound the statistic of a sample by the percentile bootstrap, seeded."""
    found = bench_library("scipy.stats").bootstrap(
        (sample,),
        statistic,
        n_resamples=resamples,
        confidence_level=LEVEL,
        method="percentile",
        vectorized=vectorized,
        rng=np.random.default_rng(seed),
    )
    return Interval(float(found.confidence_interval.low), float(found.confidence_interval.high))
