"""Confidence intervals by bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95


class Interval(NamedTuple):
    low: float
    high: float


def mean_interval(scores: Sequence[float], *, seed: int = 0) -> Interval:
    """Percentile bootstrap of the mean, 95%. Equal seeds resample equally, so policies see the same resamples."""
    values = np.asarray(scores, dtype=np.float64)
    if (values == values[0]).all():
        return Interval(float(values[0]), float(values[0]))
    drawn = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values[drawn].mean(axis=1), [tail, 1 - tail])
    return Interval(float(low), float(high))
