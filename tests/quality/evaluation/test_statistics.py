"""Intervals: cases with known answers, and the same every time."""

import numpy as np
import pytest

from kvlinker.quality.evaluation.statistics import mean_interval


def test_an_interval_is_as_wide_as_the_normal_approximation():
    scores = (np.random.default_rng(1).random(400) < 0.3).astype(float).tolist()
    mean = np.mean(scores)
    low, high = mean_interval(scores)
    half = 1.96 * np.sqrt(mean * (1 - mean) / len(scores))
    assert low < mean < high
    assert high - low == pytest.approx(2 * half, rel=0.1)


def test_reruns_are_identical_and_constants_have_no_width():
    scores = [0.0, 0.25, 1.0, 1.0]
    assert mean_interval(scores) == mean_interval(scores)
    assert mean_interval([0.7] * 3) == (0.7, 0.7)
    assert mean_interval([1.0]) == (1.0, 1.0)


def test_bounds_of_the_percentile_bootstrap():
    """Of two values, a resample's mean is one of three: each value twice in a quarter of the
    resamples."""
    assert mean_interval([0.0, 1.0]) == (0, 1)
    low, high = mean_interval([0.0] * 50 + [1.0] * 50)
    assert (low, high) == pytest.approx((0.4, 0.6), abs=0.011)  # binomial quantiles of 100 draws


def test_intervals_do_not_depend_on_the_unit_or_the_sign():
    scores = np.random.default_rng(2).normal(size=30)
    low, high = mean_interval(scores.tolist())
    assert mean_interval((10 * scores).tolist()) == pytest.approx((10 * low, 10 * high))
    assert mean_interval((scores + 5).tolist()) == pytest.approx((low + 5, high + 5))
