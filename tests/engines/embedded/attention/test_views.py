import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.engines.embedded.attention.views import View

ROWS = slice(0, 4)


def hidden(text):
    return np.array([letter == "x" for letter in text])


@pytest.mark.parametrize(
    ("mask", "first", "last", "expected"),
    [
        (None, 0, 6, (0, 6, False)),
        (None, 3, 3, None),
        ("......", 1, 5, (1, 5, False)),
        ("xx....", 0, 6, (2, 6, False)),
        ("xx..xx", 1, 6, (2, 4, False)),
        (".x.x..", 0, 6, (0, 6, True)),
        ("x.x.xx", 0, 6, (1, 4, True)),
        (".xxxx.", 1, 5, None),
    ],
)
def test_hidden_ends_are_cut_off(mask, first, last, expected):
    view = View(0, ROWS, 10, 10, first, last, None if mask is None else hidden(mask))
    trimmed = view.trimmed()
    found = None if trimmed is None else (trimmed.first, trimmed.last, trimmed.hidden is not None)
    assert found == expected
    assert trimmed is None or (trimmed.start, trimmed.rotary_start, trimmed.rows) == (10, 10, ROWS)


@given(
    start=st.integers(0, 30),
    limits=st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted),
    queries=st.sets(st.integers(0, 60), min_size=1).map(sorted),
    window=st.none() | st.integers(1, 40),
    holes=st.none() | st.sets(st.integers(0, 60), min_size=20, max_size=20).map(sorted),
)
def test_bounds_are_what_each_query_sees(start, limits, queries, window, holes):
    first, last = limits
    view = View(0, ROWS, start, 0, first, last, None, None if holes is None else np.array(holes))
    low, high = view.bounds(np.array(queries), window)
    for position, begin, end in zip(queries, low, high, strict=True):
        at = range(start, start + 20) if holes is None else holes
        seen = [
            key
            for key in range(first, last)
            if at[key] <= position and (window is None or at[key] > position - window)
        ]
        assert list(range(begin, end)) == seen
        assert first <= begin <= end <= last
