"""Correlations and tests: cases with known answers."""

import numpy as np
import pytest

from kvlinker_lab.statistics import grouped_correlation, mann_whitney, spearman


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


def test_correlation_of_groups() -> None:
    rising = grouped_correlation([1, 2, 3, 4, 5, 6], [2, 3, 5, 7, 11, 13], [0, 0, 1, 1, 2, 2])
    assert rising.value == pytest.approx(1)
    assert rising.interval == pytest.approx((1, 1))
    assert str(rising) == "1.00 [1.00, 1.00]"
    falling = grouped_correlation([1, 2, 3], [3, 2, 1], [0, 1, 2])
    assert falling.value == pytest.approx(-1)
    generator = np.random.default_rng(1)
    noise = grouped_correlation(
        generator.normal(size=60).tolist(), generator.normal(size=60).tolist(), list(range(60))
    )
    assert noise.interval.low < 0 < noise.interval.high
    assert str(noise).endswith("(no clear effect)")


@pytest.mark.parametrize(
    ("x", "y"), [([], []), ([1.0], [2.0]), ([1.0, 1.0], [2.0, 3.0]), ([1.0, 2.0], [3.0, 3.0])]
)
def test_what_never_changes_correlates_with_nothing(x: list[float], y: list[float]) -> None:
    found = grouped_correlation(x, y, list(range(len(x))))
    assert found.value is None
    assert str(found) == f"not defined (n = {len(x)})"


def test_mann_whitney_tells_same_from_different():
    # z of U = 0 among 4 and 4 is 8 / sqrt(12)
    assert mann_whitney([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(0.0209213, abs=1e-6)
    assert mann_whitney([1, 2, 2, 3], [2, 3, 3, 9]) == pytest.approx(0.1291550, abs=1e-6)
    assert mann_whitney([1, 1], [1, 1]) == 1
