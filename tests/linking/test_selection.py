from fractions import Fraction
from math import ceil

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.linking import highest, share


@given(st.integers(0, 100_000), st.integers(0, 100_000))
def test_a_share_is_rounded_up_exactly(thousandths, count):
    assert share(thousandths / 1000, count) == ceil(Fraction(thousandths, 1000) * count / 100)


def test_shares_by_hand():
    assert [share(percent, 10) for percent in (0, 1, 10, 10.1, 99, 100)] == [0, 1, 1, 2, 10, 10]
    assert share(8.8, 375) == 33  # 8.8 * 375 / 100 is 33.00000000000001
    assert share(64.4, 250) == 161
    assert share(15, 0) == 0


scores = st.lists(st.integers(-3, 3), max_size=12)


@given(scores, st.integers(0, 14), st.data())
def test_the_highest_are_the_head_of_a_sort(values, count, data):
    among = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    candidates = [i for i in range(len(values)) if among[i]]
    expected = sorted(candidates, key=lambda i: (-values[i], i))[:count]
    chosen = highest(np.array(values, dtype=np.float32), count, among=np.array(among, dtype=bool))
    assert set(np.flatnonzero(chosen)) == set(expected)


@given(scores, st.integers(0, 14))
def test_without_a_mask_all_are_candidates(values, count):
    array = np.array(values, dtype=np.float32)
    assert (
        highest(array, count) == highest(array, count, among=np.ones(len(values), dtype=bool))
    ).all()


def test_of_equal_scores_the_earlier_are_taken():
    assert np.flatnonzero(highest(np.array([1.0, 2, 1, 2, 1]), 3)).tolist() == [0, 1, 3]
    assert np.flatnonzero(highest(np.zeros(5), 2)).tolist() == [0, 1]
