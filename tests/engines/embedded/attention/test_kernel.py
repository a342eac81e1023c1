import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.engines.embedded.attention.kernel import SHARED_ROWS, View, bundle_views

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
    found = trimmed.first, trimmed.last, trimmed.hidden is not None
    assert (found if trimmed.first < trimmed.last else None) == expected
    assert (trimmed.start, trimmed.rotary_start, trimmed.rows) == (10, 10, ROWS)


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


def views_of(*sequences, rows=1):
    """Each sequence sees these segments."""
    return [
        View(segment, slice(rows * index, rows * (index + 1)), 0, 0, 0, 10)
        for index, segments in enumerate(sequences)
        for segment in segments
    ]


def described(bundles):
    """Members' first rows, and the segments that they see."""
    return sorted(
        ([rows.start for rows in bundle.members], [visit[0].segment for visit in bundle.visits])
        for bundle in bundles
    )


def test_who_sees_the_same_segments_is_one_bundle():
    found = described(bundle_views(views_of([0, 1, 2], [1, 0, 3], [0, 1, 4])))
    assert found == [([0], [2]), ([0, 1, 2], [0, 1]), ([1], [3]), ([2], [4])]


def test_segments_that_some_share_are_bundles_of_their_own():
    assert described(bundle_views(views_of([0, 1], [1], [0, 1]))) == [
        ([0, 1, 2], [1]),
        ([0, 2], [0]),
    ]


def test_what_one_sees_twice_counts_twice():
    assert described(bundle_views(views_of([0, 0], [0]))) == [([0], [0]), ([0, 1], [0])]


def test_many_queries_are_computed_alone():
    views = views_of([0, 1], [0, 2], rows=SHARED_ROWS + 1)
    assert described(bundle_views(views)) == [([0], [0, 1]), ([SHARED_ROWS + 1], [0, 2])]
    assert len(bundle_views(views_of([0], [0], rows=SHARED_ROWS))) == 1


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=6))
def test_every_view_is_visited_once_by_its_sequence(sequences):
    views = views_of(*sequences)
    visited: list[object] = []
    for bundle in bundle_views(views):
        for visit in bundle.visits:
            assert [view.rows for view in visit] == list(bundle.members)
            assert len({view.segment for view in visit}) == 1
            visited.extend(visit)
    assert sorted(map(id, visited)) == sorted(map(id, views))
