"""Searches of a row find what sorting and summing it up would."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.engines.embedded.decoding.rows import BLOCK, at_point, largest

SIZES = st.one_of(st.integers(1, 3 * BLOCK), st.integers(1, 40).map(lambda n: n * BLOCK))


@given(
    seed=st.integers(0, 100_000),
    size=SIZES,
    count=st.integers(0, 30),
    values=st.sampled_from([1, 3, 50, 10**6]),
)
def test_the_largest_are_those_that_sorting_finds(seed, size, count, values):
    """Of equal ones the first, as where tokens are chosen."""
    row = np.random.default_rng(seed).integers(0, values, size).astype(np.float32)
    row[row == 0] = -np.inf
    count = min(count, size)
    found = largest(row, count)
    assert found.tolist() == np.argsort(-row, kind="stable")[:count].tolist()
    assert not count or found[0] == row.argmax()


@given(seed=st.integers(0, 100_000), size=SIZES, point=st.floats(0, 1, exclude_max=True))
def test_a_point_lies_where_all_weights_summed_up_say(seed, size, point):
    generator = np.random.default_rng(seed)
    weights = generator.integers(1, 9, size).astype(np.float32)  # whose sums are exact
    weights[generator.random(size) < 0.6] = 0
    weights[generator.integers(size)] = 3
    found = at_point(weights, point)
    assert weights[found] > 0
    ends = weights.cumsum(dtype=np.float64)
    assert found == np.searchsorted(ends, point * ends[-1], side="right")


def test_points_beyond_the_last_weight_by_rounding_are_its():
    weights = np.zeros(3 * BLOCK, np.float32)
    weights[[5, BLOCK + 3]] = 1
    assert at_point(weights, 1.0) == BLOCK + 3
