import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.engines.contract.attention import QUERY_BLOCK
from kvlinker.engines.embedded.attention.grouping import group_queries
from kvlinker.engines.embedded.attention.kernel import AttentionPlan, View
from tests.engines.embedded.attention.scenes import Shape, random_scene
from tests.properties import examples


def calls(views, positions, window=None, long_runs=True):
    return group_queries(views, np.asarray(positions), window, long_runs=long_runs)


def test_requests_that_decode_share_a_call_without_a_mask():
    views = [View(0, slice(row, row + 1), 100 * row, 100 * row, 0, 64) for row in range(5)]
    (call,) = calls(views, [1000, 1001, 1002, 1003, 1004])
    assert call.rows.tolist() == [0, 1, 2, 3, 4]
    assert call.distances.tolist() == [1000, 901, 802, 703, 604]
    assert (call.first, call.last, call.mask, call.causal) == (0, 64, None, False)


def test_what_some_hide_is_masked():
    hides = np.arange(64) < 16
    views = [
        View(0, slice(0, 1), 0, 0, 0, 64),
        View(0, slice(1, 2), 0, 0, 20, 64),
        View(0, slice(2, 3), 0, 0, 0, 64, hides),
    ]
    (call,) = calls(views, [100, 100, 100])
    assert [np.flatnonzero(row).tolist() for row in call.mask] == [
        [],
        list(range(20)),
        list(range(16)),
    ]


def test_a_long_run_takes_no_mask():
    run = calls([View(0, slice(0, 300), 0, 0, 0, 400)], range(100, 400))
    assert [(call.first, call.last, call.causal, call.mask) for call in run] == [
        (0, 100, False, None),
        (100, 400, True, None),
    ]
    whole = calls([View(0, slice(0, 300), 0, 0, 0, 300)], range(300))
    assert [(call.first, call.last, call.causal) for call in whole] == [(0, 300, True)]
    blocks = calls([View(0, slice(0, 300), 0, 0, 0, 300)], range(300), long_runs=False)
    assert [len(call.rows) for call in blocks] == [QUERY_BLOCK, 300 - QUERY_BLOCK]
    assert [call.last for call in blocks] == [QUERY_BLOCK, 300]


def test_scattered_tokens_share_a_call_until_masks_cost_more():
    near = calls([View(0, slice(0, 4), 0, 0, 0, 512)], [3, 4, 90, 200])
    assert [len(call.rows) for call in near] == [4]
    far = calls([View(0, slice(0, 24), 0, 0, 0, 20_000)], [*range(12), *range(19_000, 19_012)])
    assert [len(call.rows) for call in far] == [12, 12]


@pytest.mark.parametrize("long_runs", [True, False])
@examples(40)
@given(seed=st.integers(0, 100_000), window=st.none() | st.integers(1, 200))
@pytest.mark.whole
def test_every_query_sees_what_its_views_show(seed, window, long_runs):
    """Counted in query-key pairs, each exactly once."""
    scene = random_scene(seed, Shape(key_dim=2, value_dim=1, window=window), dtype=torch.float32)
    plan = AttentionPlan.of(scene.views, scene.positions)
    found: list[tuple[int, ...]] = []
    expected: list[tuple[int, ...]] = []
    for call in calls(plan.views, scene.positions, window, long_runs):
        mask = (
            np.zeros((len(call.rows), call.last - call.first), np.bool_)
            if call.mask is None
            else call.mask
        )
        mask = np.tri(*mask.shape) == 0 if call.causal else mask
        assert not mask.all(axis=1).any(), "a query that sees nothing is in no call"
        seen = [
            (int(call.rows[row]), call.segment, call.first + int(key))
            for row, key in np.argwhere(~mask)
        ]
        found.extend(
            (*pair, int(call.distances[np.flatnonzero(call.rows == pair[0])[0]])) for pair in seen
        )
    for view in plan.views:
        low, high = view.bounds(scene.positions[view.rows], window)
        for row, begin, end in zip(range(view.rows.start, view.rows.stop), low, high, strict=True):
            keys = [key for key in range(begin, end) if view.hidden is None or not view.hidden[key]]
            expected.extend(
                (row, view.segment, key, int(scene.positions[row]) - view.rotary_start)
                for key in keys
            )
    assert sorted(pair[:3] for pair in found) == sorted(pair[:3] for pair in expected)
