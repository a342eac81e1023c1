"""Intervals: as wide as theory says, the same every time."""

import numpy as np
import pytest

from kvlinker.research.evaluation.bootstrap import mean_interval


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
