"""Means in bins, lines and shares, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvlinker_lab.figures.cachecraft.scatter import cumulative_share, line_through_zero, make_bins


def test_bins_hold_equally_many() -> None:
    bins = make_bins([0, 1, 2, 3], [5, 7, 1, 3], 2)
    assert [(one.x, one.y, one.n) for one in bins] == [(0.5, 6, 2), (2.5, 2, 2)]
    assert [one.n for one in make_bins([0, 0, 0, 1], [1, 2, 3, 4], 4)] == [3, 1]
    assert [(one.x, one.y, one.n) for one in make_bins([2, 2], [1, 3], 5)] == [(2, 2, 2)]
    assert make_bins([], [], 3) == []


def test_lines_go_through_zero() -> None:
    exact = line_through_zero([1, 2, 3], [2, 4, 6])
    assert (exact.slope, exact.r2) == (2, 1)
    flat = line_through_zero([0, 1], [1, 1])
    assert (flat.slope, flat.r2) == (1, None)
    worse = line_through_zero([1, 2], [2, 1])
    assert worse.slope == pytest.approx(4 / 5)
    assert worse.r2 == pytest.approx(1 - (1.2**2 + 0.6**2) / 0.5)
    assert line_through_zero([], []) == line_through_zero([0], [3]) == type(worse)(0.0, None)


def test_shares_of_the_highest() -> None:
    shares = cumulative_share(np.array([1, 6, 3]), (0, 1 / 3, 0.5, 2 / 3, 1))
    np.testing.assert_allclose(shares, (0, 0.6, 0.75, 0.9, 1))
    np.testing.assert_allclose(cumulative_share(np.zeros(4), (0.25, 1)), (0.25, 1))
