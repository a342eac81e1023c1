from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.types.chunk_scores import ChunkScores, ContextChunk, Contextualization
from kvlinker.base.types.chunks import Chunk
from kvlinker.linking import Evidence, known_policies, parse_policy
from kvlinker.linking.selection import highest, highest_windows
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt

NOTHING = Evidence()


def chunk_prompt(*lengths, header=0, fresh=3, first_prefix=()):
    """A prompt of a header, chunks of the given lengths and fresh tokens; all tokens differ."""
    token = iter(range(1000, 100_000))

    def tokens(count):
        return tuple(next(token) for _ in range(count))

    head = tokens(header)
    prefix = head if first_prefix == "header" else tuple(first_prefix)
    chunks = [
        Chunk(tokens(length), prefix if index == 0 else ()) for index, length in enumerate(lengths)
    ]
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
    assert selected("attnlink-4", chunk_prompt(6, 6, 6, header=1)) == [
        1,
        2,
        5,
        6,
        7,
        8,
        11,
        12,
        13,
        14,
    ]


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


def evidence_for(prompt, seed):
    """Scores of chunks that were computed behind another one and looked at it, and a probe's
    attention."""
    generator = np.random.default_rng(seed)
    scores = [
        ChunkScores(
            Contextualization(
                span.length,
                float(generator.random()),
                (ContextChunk("elsewhere", 7, float(inter.sum())),),
            ),
            inter=inter,
            received=generator.random(span.length, dtype=np.float32),
        )
        for span in prompt.spans
        for inter in [generator.random(span.length, dtype=np.float32)]
    ]
    return Evidence(tuple(scores), generator.random((3, len(prompt)), dtype=np.float32))


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(0, 3),
    st.floats(0, 100),
    st.floats(0, 100),
    st.integers(0, 9),
)
def test_shares_grow_with_their_parameter(lengths, header, one, other, seed):
    prompt = chunk_prompt(*lengths, header=header)
    evidence = evidence_for(prompt, seed)
    low, high = sorted([one, other])
    for family, unit in (("random", 1), ("h2o", 1), ("query", 1), ("cachecraft", 0.02)):
        cls: Any = known_policies()[family]
        smaller, larger = (cls(value * unit).select(prompt, evidence) for value in (low, high))
        assert (larger | ~smaller).all(), family
        assert not (larger & ~prompt.inexact).any(), family
        assert not cls(0).select(prompt, evidence).any(), family
        everything = cls(100 if unit == 1 else 1000).select(prompt, evidence)
        if not (family == "cachecraft" and header):  # a chunk that no other stands before has β = 1
            assert (everything == prompt.inexact).all(), family


def test_h2o_takes_the_tokens_that_receive_most():
    prompt = chunk_prompt(2, 5, 4)
    received = [[0, 0], [0.1, 0.5, 0.3, 0.5, 0.2], [0, 0, 0, 1]]
    scores = [
        ChunkScores(Contextualization(len(values), 1.0), np.zeros_like(values), values)
        for values in (np.array(each, dtype=np.float32) for each in received)
    ]
    evidence = Evidence(tuple(scores))
    assert np.flatnonzero(parse_policy("h2o-40").select(prompt, evidence)).tolist() == [3, 5, 7, 10]


def test_query_takes_its_share_of_all_inexact_tokens_wherever_they_stand():
    prompt = chunk_prompt(3, 4, 3, fresh=2)
    attention = np.zeros((2, len(prompt)), dtype=np.float32)
    attention[0] = [9, 9, 9, 0, 1, 0, 5, 3, 4, 0, 9, 9]
    attention[1] = [9, 9, 9, 0, 6, 0, 0, 3, 4, 0, 9, 9]
    evidence = Evidence((None,) * 3, attention)
    chosen = [
        np.flatnonzero(parse_policy(f"query-{r}").select(prompt, evidence)).tolist()
        for r in (0, 14, 28, 40, 60)
    ]
    assert chosen == [[], [8], [4, 8], [4, 7, 8], [3, 4, 6, 7, 8]]


def test_windows_are_computed_as_a_whole_and_stay_inside_a_chunk():
    prompt = chunk_prompt(3, 8, 2, 5, fresh=2)
    attention = np.zeros((2, len(prompt)), dtype=np.float32)
    attention[:, 3:11] = [9, 0, 0, 4, 4, 4, 0, 8]
    attention[:, 11:13] = [3, 9]
    attention[:, 13:18] = [5, 0, 1, 1, 9]
    evidence = Evidence((None,) * 4, attention)
    chosen = []
    for percent in (0, 1, 20, 40, 60, 80, 100):
        mask = parse_policy(f"query-{percent}-w3").select(prompt, evidence)
        chosen += [position for position in np.flatnonzero(mask).tolist() if position not in chosen]
    assert chosen == [6, 7, 8, 11, 12, 15, 16, 17, 3, 4, 5, 10, 9, 13, 14]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=5),
    st.integers(1, 50),
    st.integers(0, 220),
    st.integers(0, 9),
)
def test_windows_do_not_overlap(gaps, width, count, seed):
    """Until none is left, each adds as many tokens as it has; so counts add up."""
    ranges, end = [], 0
    for gap, length in gaps:
        ranges.append((end + gap, end + gap + length))
        end = ranges[-1][1]
    scores = np.random.default_rng(seed).random(end + 3, dtype=np.float32)
    mask = highest_windows(scores, count, width, ranges)
    inside = np.zeros(len(scores), dtype=np.bool_)
    for begin, end in ranges:
        inside[begin:end] = True
    assert not (mask & ~inside).any()
    taken = int(mask.sum())
    assert min(count, int(inside.sum())) <= taken < count + width
    fewer = highest_windows(scores, count // 2, width, ranges)
    assert not (fewer & ~mask).any()
    if width == 1:
        assert (mask == highest(scores, count, among=inside)).all()
    elif taken > count:  # windows alone
        for begin, end in ranges:
            runs = np.flatnonzero(np.diff(mask[begin:end], prepend=False, append=False))
            own = max(min(width, end - begin), 1)
            assert all(length % own == 0 for length in np.diff(runs)[::2])


def test_sensitive_weighs_attention_by_sensitivity():
    """Of the second chunk it was not measured: its tokens have the mean of the others', 3."""
    prompt = chunk_prompt(3, 4, 3, fresh=2)
    attention = np.ones((2, len(prompt)), dtype=np.float32)
    attention[:, 3:10] = [2, 4, 1, 3, 5, 2, 4]
    evidence = Evidence((sensitive([1, 2, 3]), unmeasured(4), sensitive([2, 9, 1])), attention)
    chosen = []
    for count in range(1, 8):
        policy = parse_policy(f"query-{14 * count}-sensitive")
        mask = policy.select(prompt, evidence)
        chosen += [position for position in np.flatnonzero(mask).tolist() if position not in chosen]
    assert chosen == [8, 4, 7, 6, 3, 9, 5], "18, 12, 10, 9, 6, 4, 3"
    shown = {score.name: score.values.tolist() for score in policy.explain(prompt, evidence)}
    assert shown == {"question_attention": [2, 4, 1, 3, 5, 2, 4], "sensitivity": [2, 9, 1]}


def test_without_any_sensitivity_attention_decides_alone():
    prompt = chunk_prompt(30, 40, 25)
    evidence = evidence_for(prompt, 3)
    plain = parse_policy("query-20").select(prompt, evidence)
    for scores in (evidence.chunk_scores, (None,) * 3):
        found = parse_policy("query-20-sensitive").select(
            prompt, Evidence(scores, evidence.attention)
        )
        assert (found == plain).all()


def sensitive(values):
    return replace(unmeasured(len(values)), sensitivity=np.array(values, dtype=np.float32))


def unmeasured(tokens):
    nothing = np.zeros(tokens, dtype=np.float32)
    return ChunkScores(Contextualization(tokens, 1.0), nothing, nothing)


def test_cachecraft_takes_what_looked_at_other_chunks_most():
    """CCI of the second chunk is 1 / (1 + exp(-(2/(5·4)) / (2.5/5²))) = 1 / (1 + e^-1) = 0.731, so
    that CFO·5 = 3.66; the third was computed alone: 0.5·4 = 2 of its first tokens."""
    prompt = chunk_prompt(2, 5, 4)
    inter = np.array([0.3, 0.1, 0.8, 0.2, 0.6], dtype=np.float32)
    second = ChunkScores(
        Contextualization(5, 2.5, (ContextChunk("elsewhere", 4, 2.0),)), inter, np.zeros_like(inter)
    )
    third = ChunkScores(
        Contextualization(4, 1.0), np.zeros(4, dtype=np.float32), np.ones(4, dtype=np.float32)
    )
    evidence = Evidence((None, second, third))
    assert np.flatnonzero(parse_policy("cachecraft-1").select(prompt, evidence)).tolist() == [
        2,
        4,
        5,
        6,
        7,
        8,
    ]
    assert np.flatnonzero(parse_policy("cachecraft-0.4").select(prompt, evidence)).tolist() == [
        4,
        6,
        7,
    ]
    cci, beta, gamma, cfo, *inter_scores = parse_policy("cachecraft-1").explain(prompt, evidence)
    np.testing.assert_allclose(cci.values, [0.5, 1 / (1 + np.exp(-1)), 0.5])
    assert beta.values.tolist() == [1, 0, 0]
    assert gamma.values.tolist() == [0, 0, 0]
    np.testing.assert_allclose(cfo.values, [0, 1 / (1 + np.exp(-1)), 0.5])
    positions = [score.positions.tolist() for score in inter_scores if score.positions is not None]
    assert positions == [[2, 3, 4, 5, 6], [7, 8, 9, 10]]


def test_cachecraft_repairs_nothing_behind_the_same_chunks_in_the_same_order():
    prompt = chunk_prompt(2, 5, 4)
    first, second, _ = prompt.contents
    context = (ContextChunk(first, 2, 0.5), ContextChunk(second, 5, 1.5))
    ones = np.ones(4, dtype=np.float32)
    known = ChunkScores(Contextualization(4, 1.0, context), ones, ones)
    chosen = {}
    for order in ([0, 1, 2], [1, 0, 2]):
        shuffled = prompt.with_chunks([prompt.chunks[index] for index in order])
        evidence = Evidence((None, None, known))
        chosen[tuple(order)] = (
            parse_policy("cachecraft-1000").select(shuffled, evidence)[7:11].sum()
        )
    assert chosen == {(0, 1, 2): 0, (1, 0, 2): 4}
