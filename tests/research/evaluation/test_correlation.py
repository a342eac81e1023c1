"""Rank correlation of samples made by hand."""

import numpy as np
import pytest

from kvlinker.research.evaluation.correlation import spearman


def test_any_monotonic_relation_is_perfect():
    values = np.array([3.0, -1.0, 10.0, 4.0])
    assert spearman(values, np.exp(values)) == pytest.approx(1)
    assert spearman(values, -(values**3)) == pytest.approx(-1)


def test_one_swap_of_neighbours():
    # 1 - 6 * (1 + 1) / (4 * (16 - 1))
    assert spearman(np.array([1, 2, 3, 4.0]), np.array([10, 30, 20, 40.0])) == pytest.approx(0.8)


def test_equal_values_share_their_mean_rank():
    # ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4
    found = spearman(np.array([0, 5, 5, 9.0]), np.array([1, 2, 3, 4.0]))
    assert found == pytest.approx(np.corrcoef([1, 2.5, 2.5, 4], [1, 2, 3, 4])[0, 1])


def test_it_is_undefined_without_variance():
    assert spearman(np.ones(3), np.arange(3.0)) is None
    assert spearman(np.arange(3.0), np.zeros(3)) is None
    assert spearman(np.ones(1), np.ones(1)) is None
    assert spearman(np.ones(0), np.ones(0)) is None
