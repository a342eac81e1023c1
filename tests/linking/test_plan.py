from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.linking import Policy, make_plan, parse_policy
from kvlinker.prompting.segments import ranges
from tests.linking.test_policies import NOTHING, chunk_prompt


class Chosen(Policy):
    """Recomputes the positions that a test names."""

    family = "chosen"

    positions: list

    def select(self, prompt, evidence):
        mask = np.zeros(len(prompt), dtype=bool)
        mask[self.positions] = True
        return mask


def test_the_readme_case():
    plan = make_plan(chunk_prompt(6, 6, header=2, fresh=3), parse_policy("legolink-2"), NOTHING)
    assert plan.runs == ((0, 4), (8, 10), (14, 17))
    assert [(p.start, p.first, p.last, p.rotary_start) for p in plan.placements] == [
        (2, 2, 6, 2),
        (8, 2, 6, 8),
    ]
    assert (plan.cached_tokens, plan.recomputed_tokens, plan.fresh_tokens) == (8, 4, 5)


def test_a_plan_prints_what_it_does():
    assert "legolink-2" in repr(make_plan(chunk_prompt(6, 6), parse_policy("legolink-2"), NOTHING))


def test_unpositioned_keys_keep_their_old_positions():
    plan = make_plan(chunk_prompt(6, 6, header=2), parse_policy("naive-unpositioned"), NOTHING)
    assert [p.rotary_start for p in plan.placements] == [0, 0]


def test_full_places_and_loads_nothing():
    plan = make_plan(chunk_prompt(6, 6), parse_policy("full"), NOTHING)
    assert plan.placements == ()
    assert plan.runs == ((0, 15),)


def test_a_prompt_that_ends_in_a_chunk_computes_its_last_token():
    plan = make_plan(chunk_prompt(6, 6, fresh=0), parse_policy("naive"), NOTHING)
    assert plan.runs == ((11, 12),)
    assert (plan.cached_tokens, plan.recomputed_tokens) == (11, 1)


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(0, 4),
    st.integers(0, 4),
    st.lists(st.integers(0, 10**6), max_size=30),
)
def test_every_position_is_computed_or_placed(lengths, header, fresh, raw):
    prompt = chunk_prompt(*lengths, header=header, fresh=fresh)
    chosen = sorted({position % len(prompt) for position in raw})
    plan = make_plan(prompt, Chosen(chosen), NOTHING)
    computed, placed = np.zeros(len(prompt), dtype=bool), np.zeros(len(prompt), dtype=bool)
    for begin, end in plan.runs:
        assert not computed[begin:end].any()
        computed[begin:end] = True
    for placement in plan.placements:
        placed[placement.start + placement.first : placement.start + placement.last] = True
    assert (computed | placed).all()
    assert computed[chosen].all()
    assert computed[-1]
    assert plan.cached_tokens + plan.recomputed_tokens + plan.fresh_tokens == len(prompt)
    assert plan.cached_tokens == (~computed).sum()
    assert plan.fresh_tokens == header + fresh


@given(st.lists(st.booleans(), max_size=60))
def test_ranges_cover_exactly_the_true_positions(bits):
    mask = np.array(bits, dtype=bool)
    found = ranges(mask)
    rebuilt = np.zeros(len(bits), dtype=bool)
    for begin, end in found:
        assert begin < end
        rebuilt[begin:end] = True
    assert (rebuilt == mask).all()
    assert all(a[1] < b[0] for a, b in pairwise(found))


def test_a_selection_is_not_changed_by_planning():
    prompt = chunk_prompt(6, 6)
    mask = np.zeros(len(prompt), dtype=bool)

    class Shared(Chosen):
        def select(self, _prompt, _evidence):
            return mask

    make_plan(prompt, Shared([]), NOTHING)
    assert not mask.any()
    with pytest.raises(AttributeError):
        make_plan(prompt, Shared([]), NOTHING).fresh_tokens = 3  # type: ignore[misc]


class Returning(Policy):
    """Returns what a test names as its selection."""

    family = "returning"

    selection: object

    def select(self, prompt, evidence):
        return self.selection


@pytest.mark.parametrize(
    "selection", [np.array([7]), True, None, np.ones((1, 15), dtype=bool), np.ones(14, dtype=bool)]
)
def test_a_selection_that_is_no_mask_is_refused(selection):
    """The number of one position, alone in an array, would select every token."""
    with pytest.raises(ValueError, match=r"select returned shape .* for 15 tokens"):
        make_plan(chunk_prompt(6, 6), Returning(selection), NOTHING)


def test_a_mask_of_numbers_is_a_mask():
    plan = make_plan(chunk_prompt(6, 6), Returning([0, 1] * 6 + [0] * 3), NOTHING)
    assert plan.recomputed_tokens == 6
    assert [selection.dtype for selection in plan.selections] == [np.bool_]
