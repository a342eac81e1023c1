"""What the figures of Cache-Craft stand on: chunks of earlier prompts, new contexts, and policies
for its parts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvlinker.base.types.chunk_scores import ChunkScores, ContextChunk, Contextualization
from kvlinker.base.types.chunks import Chunk
from kvlinker.linking import Evidence, parse_policy
from kvlinker.linking.policies.cachecraft import context_impact
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt
from kvlinker.settings import load_settings
from kvlinker_lab.figures.cachecraft.earlier_prompts import (
    ContextOrder,
    EarlierPrompts,
    UnpositionedContextOrder,
    WithoutOverlap,
    ask,
    scores_of,
)
from kvlinker_lab.figures.cachecraft.needed_recomputation import needed_share
from kvlinker_lab.figures.cachecraft.new_contexts import ORDERS, OTHERS, PARTS, reuses
from kvlinker_lab.figures.figure import find_figure, known_figures
from kvlinker_lab.figures.lab import Lab, OpenReader

CACHECRAFT = [
    name
    for name, one in known_figures().items()
    if name.startswith("cachecraft") and one.shape is None
]


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab(load_settings(), "kvlinker-lab figure", limit=5)


@pytest.fixture(scope="module")
def reader(lab: Lab) -> Iterator[OpenReader]:
    with lab.open_reader(limit=5) as running:
        yield running


def scores_behind(before: str) -> ChunkScores:
    """Scores of a chunk of 4 tokens that gave 3 of its attention to the chunk before it."""
    inter = np.array([0.5, 0.9, 0.7, 0.9], dtype=np.float32)
    context = (ContextChunk(before, tokens=2, attention=3.0),)
    return ChunkScores(Contextualization(4, 1.0, context), inter=inter, received=inter)


def test_parts_of_cachecraft_select_what_they_should() -> None:
    chunk = Chunk((5, 6, 7, 8), prefix=(1,))
    prompt = Prompt((FreshSegment((2, 3)), CachedSegment(chunk), FreshSegment((4,))))
    known = Evidence((scores_behind("before"),))
    for percent, places in ((0, []), (25, [1]), (26, [1, 3]), (75, [1, 2, 3]), (100, [0, 1, 2, 3])):
        for policy in (ContextOrder(percent), UnpositionedContextOrder(percent)):
            assert np.flatnonzero(policy.select(prompt, known)).tolist() == [
                2 + place for place in places
            ]
    exact = prompt.with_chunks([Chunk(chunk.tokens, prefix=(2, 3))])
    assert not ContextOrder(100).select(exact, known).any()
    assert not WithoutOverlap.parse("1").select(exact, known).any()
    assert (ContextOrder(1).positioned, UnpositionedContextOrder(1).positioned) == (True, False)

    behind = Prompt((CachedSegment(Chunk((9, 9, 9, 9))), CachedSegment(chunk)))
    scores = scores_behind(behind.contents[0])  # all of it stands there again: β = 1
    known = Evidence((scores, scores))
    share = 0.5 * context_impact(scores.contextualization)
    assert parse_policy("cachecraft-0.5").select(behind, known)[4:].sum() == 0
    assert WithoutOverlap.parse("0.5").select(behind, known)[4:].sum() == np.ceil(share * 4)
    assert WithoutOverlap.parse("0.5-focus").name == "cachecraft-without-beta-0.5-focus"


def test_earlier_prompts_hold_all_chunks_in_other_places(reader: OpenReader) -> None:
    earlier = EarlierPrompts(reader.llm, reader.examples)
    example = reader.examples[0]
    chunks = [reader.llm.builder.encode_chunk(passage) for passage in example.passages]
    prompt = ask(reader.llm, chunks, example.question)
    changed = earlier(example, prompt)
    assert changed.tokens.tolist() == prompt.tokens.tolist()
    assert sum(span.exact for span in changed.spans) <= 1
    contexts = [scores_of(reader.llm, chunk).contextualization.context for chunk in changed.chunks]
    own = set(prompt.contents)
    shared = [before.content in own for context in contexts for before in context]
    assert 0.2 < np.mean(shared) < 0.8
    assert earlier(example, prompt) == changed
    alone = EarlierPrompts(reader.llm, [example])(example, prompt)
    assert alone.contents == prompt.contents


@pytest.mark.whole
def test_new_contexts_are_what_they_are_called(lab: Lab) -> None:
    found = reuses(lab, limit=5, percents=(0, 50, 100))
    assert {reuse.kind for reuse in found} == {OTHERS, PARTS, ORDERS}
    for reuse in found:
        assert 0.5 < reuse.cci <= 1
        assert 0 < reuse.outside < 1
        none, half, all_ = reuse.deviations
        assert none > half > all_
        if reuse.kind == OTHERS:
            assert reuse.beta == 0
        if reuse.kind == PARTS:
            assert (reuse.beta < 1, reuse.gamma) == (True, 0)
        if reuse.kind == ORDERS:
            assert reuse.beta == pytest.approx(1)
            assert 0 < reuse.gamma <= 1


NEEDED = [
    ((0.2, 0.1), 0.3, 0),
    ((0.2, 0.1), 0.2, 0),
    ((0.2, 0.1), 0.15, 0.25),
    ((0.2, 0.1), 0.05, 0.75),
    ((0.2, 0.1), 0, 1),
    ((0.2, 0.2), 0.1, 0.75),
    ((0.1, 0.2), 0.05, 0.875),
]


def test_needed_shares_lie_between_what_was_measured(subtests: pytest.Subtests) -> None:
    for deviations, threshold, share in NEEDED:
        with subtests.test(deviations=deviations, threshold=threshold):
            assert needed_share((0, 50), deviations, threshold) == pytest.approx(share)


@pytest.mark.whole
@pytest.mark.parametrize("name", CACHECRAFT)
def test_one_example_is_enough_to_tell_something(name: str) -> None:
    figure = find_figure(name)
    rows = figure.measure(Lab(load_settings(), "kvlinker-lab figure", limit=1))
    assert figure.finding(rows)
    assert all(set(figure.columns) <= set(row) for row in figure.table_rows(rows))
