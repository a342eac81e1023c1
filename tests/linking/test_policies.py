import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.chunks import Chunk
from kvlinker.engine.link_loading import PromptEvidence
from kvlinker.linking import parse_policy
from kvlinker.prompt.segments import CachedSegment, FreshSegment, Prompt

NOTHING = PromptEvidence()


def chunk_prompt(*lengths, header=0, fresh=3, first_prefix=()):
    """A prompt of a header, chunks of the given lengths and fresh tokens; all tokens differ."""
    token = iter(range(1000, 100_000))

    def tokens(count):
        return tuple(next(token) for _ in range(count))

    head = tokens(header)
    prefix = head if first_prefix == "header" else tuple(first_prefix)
    chunks = [Chunk(tokens(length), prefix if index == 0 else ()) for index, length in enumerate(lengths)]
    return Prompt((FreshSegment(head), *map(CachedSegment, chunks), FreshSegment(tokens(fresh))))


def selected(policy, prompt):
    return np.flatnonzero(select(policy, prompt)).tolist()


def select(policy, prompt, evidence=NOTHING):
    return parse_policy(policy).select(prompt, evidence) & prompt.cached


def test_legolink_takes_the_first_tokens_of_all_chunks_but_the_exact_first():
    assert selected("legolink-2", chunk_prompt(5, 5, 5)) == [5, 6, 10, 11]


def test_legolink_repairs_the_first_chunk_too_when_a_header_precedes_it():
    assert selected("legolink-2", chunk_prompt(5, 5, header=2)) == [2, 3, 7, 8]


def test_a_first_chunk_made_behind_the_header_is_exact():
    prompt = chunk_prompt(5, 5, header=2, first_prefix="header")
    assert [span.exact for span in prompt.spans] == [True, False]
    assert selected("legolink-2", prompt) == [7, 8]


def test_a_chunk_made_behind_other_tokens_of_the_same_number_is_not_exact():
    prompt = chunk_prompt(5, header=2, first_prefix=(7, 8))
    assert [span.exact for span in prompt.spans] == [False]


def test_legolink_stops_at_the_end_of_a_short_chunk():
    assert selected("legolink-9", chunk_prompt(5, 3, 5)) == [5, 6, 7, 8, 9, 10, 11, 12]


def test_attnlink_takes_both_sides_of_each_boundary():
    assert selected("attnlink-4", chunk_prompt(6, 6, 6, header=1)) == [1, 2, 5, 6, 7, 8, 11, 12, 13, 14]


def test_attnlink_leaves_an_exact_chunk_alone():
    assert selected("attnlink-4", chunk_prompt(6, 6)) == [6, 7]


def test_prefix_keeps_only_what_a_prefix_cache_would_hold():
    prompt = chunk_prompt(5, 5, fresh=2)
    assert selected("prefix", prompt) == list(range(5, 10))
    assert selected("prefix", chunk_prompt(5, 5, header=1, fresh=1)) == list(range(1, 11))


@pytest.mark.parametrize("percent", [0, 1, 15, 50, 100])
def test_random_takes_its_share_of_every_inexact_chunk(percent):
    prompt = chunk_prompt(10, 200, 33)
    chosen = select(f"random-{percent}", prompt)
    for span in prompt.spans[1:]:
        assert chosen[span.start : span.end].sum() == -(-span.length * percent // 100)
    assert not chosen[:10].any()


def test_random_is_the_same_for_the_same_prompt_only():
    prompt = chunk_prompt(50, 200)
    assert selected("random-20", prompt) == selected("random-20", chunk_prompt(50, 200))
    assert selected("random-20", prompt) != selected("random-20", chunk_prompt(50, 200, fresh=4))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 3), st.integers(2, 60))
def test_selections_grow_with_their_parameter(lengths, header, count):
    prompt = chunk_prompt(*lengths, header=header)
    for family in ("legolink", "attnlink"):
        smaller, larger = (select(f"{family}-{k}", prompt) for k in (count, count + 1))
        assert (larger | ~smaller).all()
