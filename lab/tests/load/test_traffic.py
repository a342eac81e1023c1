"""Traffic follows from its seed alone, and has the lengths, the popularity and the turns that were
asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.errors import InvalidRequestError
from kvlinker_lab.load.traffic import (
    KINDS,
    TrafficShape,
    make_conversations,
    make_library,
    poisson_arrivals,
    random_text,
)

SHAPE = TrafficShape(
    library=8, chunks=3, chunk_tokens=50, fresh_tokens=10, output_tokens=(2, 6), turns=3
)


@pytest.mark.parametrize("kind", KINDS)
def test_traffic_follows_from_its_seed(kind: str) -> None:
    shape = replace(SHAPE, kind=kind)
    assert make_conversations(shape, 5, 2.0, seed=3) == make_conversations(shape, 5, 2.0, seed=3)
    assert make_conversations(shape, 5, 2.0, seed=3) != make_conversations(shape, 5, 2.0, seed=4)
    assert make_library(shape, 2.0, seed=3) == make_library(shape, 2.0, seed=3)
    assert poisson_arrivals(2, 5, seed=3) == poisson_arrivals(2, 5, seed=3)


@given(
    kind=st.sampled_from(sorted(KINDS)),
    chunks=st.integers(1, 5),
    spare=st.integers(1, 4),
    turns=st.integers(1, 12),
    zipf=st.floats(0, 3),
    seed=st.integers(0, 1000),
)
def test_prompts_have_different_documents_of_the_library(
    kind: str, chunks: int, spare: int, turns: int, zipf: float, seed: int
) -> None:
    shape = TrafficShape(kind, library=chunks + spare, chunks=chunks, turns=turns, zipf=zipf)
    for conversation in make_conversations(shape, 3, 1.0, seed=seed):
        assert len(conversation.turns) == shape.requests_per_conversation
        for turn in conversation.turns:
            assert len(set(turn.documents)) == len(turn.documents)
            assert set(turn.documents) <= set(range(shape.library))


@given(characters=st.integers(1, 300), seed=st.integers(0, 100))
def test_texts_are_as_long_as_asked(characters: int, seed: int) -> None:
    assert len(random_text(np.random.default_rng(seed), characters)) == characters


def test_lengths_are_in_tokens() -> None:
    texts = make_library(SHAPE, 4.0, seed=0)
    assert {len(text) for text in texts} == {200}
    assert len({text[:20] for text in texts}) == SHAPE.library
    turns = [one.turns[0] for one in make_conversations(SHAPE, 200, 4.0, seed=0)]
    assert {len(turn.question) for turn in turns} == {40}
    assert len({turn.question for turn in turns}) == 200
    assert {turn.output_tokens for turn in turns} == {2, 3, 4, 5, 6}


def test_popular_documents_are_asked_for_more_often() -> None:
    def asked(zipf: float) -> list[int]:
        made = make_conversations(replace(SHAPE, zipf=zipf, chunks=1), 2000, 1.0, seed=0)
        counted = Counter(document for one in made for document in one.turns[0].documents)
        return [counted[document] for document in range(SHAPE.library)]

    ranks = asked(1.0)
    assert ranks[0] / ranks[1] == pytest.approx(2, rel=0.2)
    assert ranks[0] / ranks[3] == pytest.approx(4, rel=0.3)
    assert max(asked(0.0)) / min(asked(0.0)) < 1.4


def test_later_turns_bring_another_document() -> None:
    (conversation,) = make_conversations(replace(SHAPE, kind="conversation"), 1, 1.0, seed=0)
    first, *later = (turn.documents for turn in conversation.turns)
    assert len(first) == 3
    assert [len(documents) for documents in later] == [1, 1]
    assert len({*first, *later[0], *later[1]}) == 5
    assert [turn.think_seconds for turn in conversation.turns] == [0, 1, 1]


def test_agents_share_their_tools() -> None:
    made = make_conversations(replace(SHAPE, kind="agent"), 4, 1.0, seed=0)
    assert {conversation.preamble for conversation in made} == {(0, 1, 2)}
    for conversation in made:
        task, *steps = conversation.turns
        assert not task.documents
        assert all(step.documents[0] > 2 and not step.think_seconds for step in steps)


def test_arrivals_have_the_rate() -> None:
    arrivals = np.array(poisson_arrivals(4.0, 4000, seed=0))
    gaps = np.diff(arrivals)
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)  # as an exponential distribution's


@pytest.mark.parametrize("count", [1, 2, 12])
def test_few_arrivals_have_the_rate_too(count: int) -> None:
    lengths = [poisson_arrivals(4.0, count, seed=seed)[-1] for seed in range(200)]
    assert max(lengths) < count / 4.0
    assert np.mean(lengths) == pytest.approx(
        count / (count + 1) * count / 4.0, rel=0.1
    )  # the largest of uniform ones


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "storm"}, "Unknown traffic 'storm'; known are documents, conversation, agent"),
        ({"library": 2}, "A library of 2 documents is too small: documents with 3 chunks need 3"),
        ({"library": 3, "kind": "agent"}, "agent with 3 chunks need 4"),
        ({"output_tokens": (5, 2)}, "5 to 2"),
    ],
)
def test_impossible_traffic(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        replace(SHAPE, **changes)
