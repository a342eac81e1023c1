"""Cache-Craft's scores and Algorithm 1, against cases computed by hand and the paper's formulas
written out."""

import math
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.types.chunk_scores import ContextChunk, Contextualization
from kvlinker.linking.policies.cachecraft import (
    adjusted_overlap,
    context_impact,
    fix_overhead,
    focused_chunks,
    order_penalty,
    prefix_overlap,
    stable_focus,
)

BY_HAND = Contextualization(
    4, intra=1.6, context=(ContextChunk("A", 2, 0.8), ContextChunk("B", 5, 1.0))
)
ALONE = Contextualization(7, intra=3.0)


def behind(*attention, tokens=6, intra=2.0):
    """A chunk computed behind A, B, C, … of 3 tokens each, and its attention on each of them."""
    context = tuple(
        ContextChunk(name, 3, value) for name, value in zip("ABCDEFGH", attention, strict=False)
    )
    return Contextualization(tokens, intra, context)


def test_context_impact_by_hand():
    """a = 0.8/(4·2) + 1/(4·5) = 0.15, b = 1.6/16 = 0.1."""
    assert context_impact(BY_HAND) == pytest.approx(1 / (1 + math.exp(-1.5)))


ENDS = [
    (ALONE, 0.5),
    (Contextualization(1, intra=0.0), 0.5),
    (behind(0.0), 0.5),
    (
        Contextualization(1, 0.0, (ContextChunk("A", 2, 0.3),)),
        1.0,
    ),  # one token looks outside, or at itself
    (behind(1.0, intra=1e-30), 1.0),
    (behind(1.0, intra=5e-324), 1.0),
]


def test_context_impact_at_its_ends(subtests):
    for chunk, impact in ENDS:
        with subtests.test(str(chunk)):
            assert context_impact(chunk) == pytest.approx(impact)


OVERLAPS = [
    ([], 0.0),
    (["B"], 1.0 / 1.8),
    (["A"], 0.8 / 1.8),
    (["A", "B"], 1.0),
    (["B", "A"], 1.0),
    (["X", "B", "Y"], 1.0 / 1.8),
    (["X"], 0.0),
    (["A", "A"], 0.8 / 1.8),
]


def test_prefix_overlap_by_hand(subtests):
    for new, beta in OVERLAPS:
        with subtests.test(str(new)):
            assert prefix_overlap(BY_HAND, new) == pytest.approx(beta)


def test_overlap_of_a_chunk_that_was_computed_alone():
    assert prefix_overlap(ALONE, []) == 1
    assert prefix_overlap(ALONE, ["A"]) == 0
    assert prefix_overlap(behind(0.0, 0.0), ["A"]) == 0


PENALTIES = [
    ("", 0),
    ("A", 0),
    ("XAY", 0),
    ("ABCD", 0),
    ("BACD", 1 / 6),
    ("DCBA", 1),
    ("CXA", 1),
    ("AXC", 0),
    ("BDCA", 4 / 6),  # BA, DA, CA and DC
    ("CAB", 2 / 3),
]


def test_order_penalty_by_hand(subtests):
    for new, gamma in PENALTIES:
        with subtests.test(new):
            assert order_penalty(behind(1, 1, 1, 1), list(new)) == pytest.approx(gamma)


def test_the_papers_scenarios():
    """Section 3.1: of the cache (C3 | C1 C2), behind C4 C2, behind C5 C6, and behind C2 C1."""
    chunk = Contextualization(9, 4.0, (ContextChunk("C1", 5, 0.5), ContextChunk("C2", 7, 1.5)))
    assert adjusted_overlap(chunk, ["C4", "C2"]) == 0.75
    assert adjusted_overlap(chunk, ["C5", "C6"]) == 0
    assert prefix_overlap(chunk, ["C2", "C1"]) == 1
    assert adjusted_overlap(chunk, ["C2", "C1"]) == 0


def test_fix_overhead_by_hand():
    impact = 1 / (1 + math.exp(-1.5))
    assert fix_overhead(BY_HAND, ["B"]) == pytest.approx(impact * 0.8 / 1.8)
    assert fix_overhead(BY_HAND, ["B"], alpha=0.5) == pytest.approx(0.5 * impact * 0.8 / 1.8)
    assert fix_overhead(BY_HAND, ["B"], alpha=100) == 1
    assert fix_overhead(BY_HAND, ["B", "A"]) == pytest.approx(impact)  # β = 1, but γ = 1 too
    assert fix_overhead(BY_HAND, ["A", "B"], alpha=1000) == 0
    assert fix_overhead(ALONE, ["A"]) == 0.5
    assert fix_overhead(ALONE, []) == 0


NAMES = "ABCDEFGH"
attentions = st.lists(st.floats(0, 50), min_size=0, max_size=6)
orders = st.lists(st.sampled_from(NAMES + "XYZ"), max_size=8)
alphas = st.floats(0, 1000)


def kendall(old, new):
    """Discordant pairs among all pairs of chunks that stand in both; the first place counts."""
    common = [name for name in old if name in new]
    pairs = [(a, b) for a in common for b in common if a < b]
    discordant = [
        (a, b)
        for a, b in pairs
        if (old.index(a) - old.index(b)) * (new.index(a) - new.index(b)) < 0
    ]
    return len(discordant) / len(pairs) if pairs else 0.0


@given(attentions, orders)
def test_order_penalty_is_kendalls_distance(attention, new):
    assert order_penalty(behind(*attention), new) == pytest.approx(
        kendall(list(NAMES[: len(attention)]), new)
    )


@given(st.permutations(NAMES[:5]))
def test_reversing_the_new_order_mirrors_the_penalty(new):
    chunk = behind(1, 1, 1, 1, 1)
    assert order_penalty(chunk, new) + order_penalty(chunk, new[::-1]) == pytest.approx(1)


@given(attentions, orders, st.randoms(use_true_random=False))
def test_overlap_ignores_order_and_strangers(attention, new, random):
    chunk = behind(*attention)
    shuffled = sorted(new, key=lambda _: random.random())
    assert prefix_overlap(chunk, shuffled) == prefix_overlap(chunk, new)
    reordered = replace(chunk, context=tuple(sorted(chunk.context, key=lambda _: random.random())))
    assert prefix_overlap(reordered, new) == pytest.approx(prefix_overlap(chunk, new))
    if new:
        assert prefix_overlap(chunk, [*new, "a stranger"]) == prefix_overlap(chunk, new)


@given(attentions, orders, st.sampled_from(NAMES), alphas, alphas)
def test_scores_stay_in_their_ranges_and_order(attention, new, another, alpha, other):
    chunk = behind(*attention)
    assert 0.5 <= context_impact(chunk) <= 1
    assert 0 <= prefix_overlap(chunk, new) <= 1
    assert 0 <= order_penalty(chunk, new) <= 1
    assert 0 <= adjusted_overlap(chunk, new) <= prefix_overlap(chunk, new)
    if new:
        assert prefix_overlap(chunk, new) <= prefix_overlap(chunk, [*new, another])
    low, high = sorted([alpha, other])
    assert 0 <= fix_overhead(chunk, new, low) <= fix_overhead(chunk, new, high) <= 1
    assert fix_overhead(chunk, new, 0) == 0
    expected = (
        alpha
        * context_impact(chunk)
        * (1 - prefix_overlap(chunk, new) * (1 - order_penalty(chunk, new)))
    )
    assert fix_overhead(chunk, new, alpha) == pytest.approx(min(expected, 1))


@given(
    st.lists(st.floats(0.01, 50), min_size=1, max_size=6), st.floats(0.01, 50), st.floats(1.01, 10)
)
def test_a_chunk_that_looks_outside_more_or_at_itself_less_has_a_higher_impact(
    attention, intra, factor
):
    before = context_impact(behind(*attention, intra=intra))
    assert context_impact(behind(*[value * factor for value in attention], intra=intra)) >= before
    assert context_impact(behind(*attention, intra=intra / factor)) >= before
    assert context_impact(behind(*attention, intra=intra * factor)) <= before


@given(st.lists(st.floats(0.01, 50), min_size=1, max_size=6))
def test_the_old_order_needs_no_repair_and_every_other_does(attention):
    chunk = behind(*attention)
    old = list(NAMES[: len(attention)])
    assert fix_overhead(chunk, old, 1000) == 0
    for new in list(permutations(old))[1:20]:
        assert fix_overhead(chunk, new) > 0


FOCUSED = [
    ([], set()),
    ([3.0], {0}),
    ([3.0, 1.0], {0, 1}),
    ([2.0, 2.0, 2.0, 2.0], {0, 1, 2, 3}),
    ([0.0, 0.0, 0.0], {0, 1, 2}),
    ([1.0, 5.0, 2.0], {1}),  # k - 2 = 1: there is one candidate only
    # Sorted 6, 2, 1.9, 0.9. Differences 4, 0.1, 1, p = 0.784, 0.020, 0.196, -p·log p = 0.191,
    # 0.077, 0.319: i* = 2.
    ([0.9, 6.0, 1.9, 2.0], {1, 3}),
    # Sorted 5, 4, 1, 0.5. Differences 1, 3, 0.5, p = 0.222, 0.667, 0.111, -p·log p = 0.334,
    # 0.270, 0.244: i* = 1.
    ([4.0, 1.0, 0.5, 5.0], {3}),
    # Sorted 9, 9, 8, 3, 0. Differences 0, 1, 5, 3, -p·log p = 0, 0.244, 0.327, 0.366: i* = 3.
    ([9.0, 0.0, 9.0, 3.0, 8.0], {0, 2, 4}),
    # Sorted 7, 7, 7, 6. Differences 0, 0, 1: all growth is 0, and the first is taken.
    ([7.0, 6.0, 7.0, 7.0], {0}),
]


def test_algorithm_1_by_hand(subtests):
    for attention, focused in FOCUSED:
        with subtests.test(str(attention)):
            assert focused_chunks(np.array(attention, dtype=np.float32)) == focused


def entropy_growth(attention):
    """Algorithm 1, lines 4 to 8, as it is written: [h[i + 1] - h[i] for i in 1 to k - 2]."""
    ranked = sorted(attention, reverse=True)
    difference = [ranked[i] - ranked[i + 1] for i in range(len(ranked) - 1)]
    p = [value / sum(difference) for value in difference]
    h = [-sum(p[j] * math.log(p[j]) for j in range(i + 1) if p[j] > 0) for i in range(len(p))]
    return [h[i + 1] - h[i] for i in range(len(h) - 1)]


@given(st.lists(st.integers(0, 1000), min_size=3, max_size=9))
def test_algorithm_1_as_it_is_written(attention):
    focused = focused_chunks(np.array(attention, dtype=np.float64))
    if len(set(attention)) == 1:
        assert focused == set(range(len(attention)))
        return
    growth = entropy_growth(attention)
    assert growth[len(focused) - 1] >= max(growth) - 1e-9
    assert all(g < max(growth) + 1e-9 for g in growth[: len(focused) - 1])
    left_out = [value for chunk, value in enumerate(attention) if chunk not in focused]
    assert min(attention[chunk] for chunk in focused) >= max(left_out)


@given(
    st.lists(st.integers(0, 1000), min_size=3, max_size=9, unique=True),
    st.randoms(use_true_random=False),
)
def test_the_focus_follows_the_chunks(attention, random):
    order = sorted(range(len(attention)), key=lambda _: random.random())
    moved = focused_chunks(np.array([attention[chunk] for chunk in order], dtype=np.float64))
    assert {order[place] for place in moved} == focused_chunks(
        np.array(attention, dtype=np.float64)
    )


CROSSING = np.array([[3, 1, 0], [0, 4, 0], [0, 1, 0], [0, 1, 0]], dtype=np.float32)
"""Running sums 3 1 0, 3 5 0, 3 6 0, 3 7 0: chunk 0 is focused in the first layer, chunk 1 from then
on."""


@pytest.mark.parametrize(
    ("window", "settled"), [(1, ({0}, 1)), (2, ({1}, 3)), (3, ({1}, 4)), (4, None), (5, None)]
)
def test_the_focus_settles_when_it_lasts(window, settled):
    assert stable_focus(CROSSING, window) == settled


def test_layers_are_summed_up():
    """In the second layer alone chunk 1 is looked at most, but not in both together."""
    attention = np.array([[5, 1, 0], [0, 2, 0]], dtype=np.float32)
    assert stable_focus(attention, 2) == (frozenset({0}), 2)


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_few_chunks_are_all_focused(chunks):
    assert stable_focus(np.ones((4, chunks), dtype=np.float32), 3) == (frozenset(range(chunks)), 3)


def test_nothing_settles_before_the_first_layer():
    assert stable_focus(np.zeros((0, 4), dtype=np.float32), 1) is None


@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), max_size=8), st.integers(1, 5))
def test_settling_is_the_first_time_that_the_window_is_all_the_same(rows, window):
    attention = np.array(rows, dtype=np.float64).reshape(-1, 4)
    found = [focused_chunks(attention[: layer + 1].sum(0)) for layer in range(len(rows))]
    lasting = [
        layer
        for layer in range(window, len(rows) + 1)
        if len(set(found[layer - window : layer])) == 1
    ]
    assert stable_focus(attention, window) == (
        (found[lasting[0] - 1], lasting[0]) if lasting else None
    )
