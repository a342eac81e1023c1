from hypothesis import given
from hypothesis import strategies as st

from kvlinker.engines.embedded.attention.bundles import MOST_SHARING_ROWS, bundle_views
from kvlinker.engines.embedded.attention.views import View


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
    views = views_of([0, 1], [0, 2], rows=MOST_SHARING_ROWS + 1)
    assert described(bundle_views(views)) == [([0], [0, 1]), ([MOST_SHARING_ROWS + 1], [0, 2])]
    assert len(bundle_views(views_of([0], [0], rows=MOST_SHARING_ROWS))) == 1


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
