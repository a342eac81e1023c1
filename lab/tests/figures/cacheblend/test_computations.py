"""What figures compute from what was measured, on cases made by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvlinker.base.types.chunks import Chunk
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt
from kvlinker_lab.figures.cacheblend import kv_deviation
from kvlinker_lab.figures.cacheblend.attention_deviation import most_deviating
from kvlinker_lab.figures.cacheblend.kv_deviation import (
    ReusedTokens,
    share_among_top,
    times_others,
    top_share,
)
from kvlinker_lab.figures.cacheblend.retrieved_chunks import retrieve
from kvlinker_lab.figures.figure import find_figure

PASSAGES = (
    "Ada lives in Rome.\n\n",
    "Ben lives in Oslo, as Ben says.\n\n",
    "It rained.\n\n",
    "Ada likes figs.\n\n",
)


def test_retrieval_ranks_by_words_and_keeps_the_passages_order() -> None:
    assert retrieve("Where does ben live?", PASSAGES, 1) == PASSAGES[1:2]
    assert retrieve("Tell me of Ada.", PASSAGES, 2) == (PASSAGES[0], PASSAGES[3])
    assert retrieve("Ada", PASSAGES, 9) == PASSAGES


def test_rare_words_count_more_and_ties_go_to_the_earlier_passage() -> None:
    assert retrieve("Who lives in Oslo?", PASSAGES, 1) == PASSAGES[1:2]
    assert retrieve("Unheard of", PASSAGES, 2) == PASSAGES[:2]
    assert retrieve("Anything", (), 3) == ()


def test_shares_of_the_top() -> None:
    values = np.array([1.0, 7.0, 1.0, 1.0, 0.0])
    first = np.array([True, True, False, False, False])
    assert top_share(values, 20) == pytest.approx(0.7)
    assert top_share(values, 40) == pytest.approx(0.8)
    assert top_share(np.zeros(5), 20) == pytest.approx(0.2)
    assert share_among_top(values, first, 20) == 1
    assert share_among_top(values, first, 60) == pytest.approx(2 / 3)
    assert times_others(0.7, 20) == pytest.approx(7 / 0.75)
    assert times_others(1.0, 20) == math.inf


def test_the_oracle_takes_inexact_tokens_by_their_deviation_over_all_layers() -> None:
    prompt = Prompt((FreshSegment((1, 2)), CachedSegment(Chunk((3, 4, 5, 6))), FreshSegment((7,))))
    assert prompt.inexact.tolist() == [False, False, True, True, True, True, False]
    distance = np.array([[9, 9, 3, 0, 1, 2, 9], [9, 9, 0, 4, 1, 2, 9]], dtype=np.float32)
    assert most_deviating(prompt, distance, 25).positions == (3,)
    policy = most_deviating(prompt, distance, 50)
    assert policy.positions == (2, 3)
    assert np.flatnonzero(policy.select(prompt, None)).tolist() == [2, 3]  # type: ignore[arg-type]
    assert most_deviating(prompt, distance, 0).positions == ()


@pytest.fixture
def reused(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Measures the named figure on deviations [layers, tokens]; the first token of ten starts a
    chunk."""

    def measure(name: str, *deviations: Any) -> Any:
        prompts = []
        for deviation in deviations:
            values = np.asarray(deviation, dtype=np.float32)
            prompts.append(ReusedTokens(values, np.arange(values.shape[1]) % 10 == 0))
        monkeypatch.setattr(kv_deviation, "reused_tokens", lambda lab, limit: iter(prompts))
        figure = find_figure(name)
        rows = figure.measure(None)  # type: ignore[arg-type]
        return rows, figure.finding(rows)

    return measure


def test_ranks_that_stay_and_ranks_that_do_not(reused: Any) -> None:
    up = np.arange(10.0)
    rows, finding = reused("cacheblend-8", [0 * up, up, up**2, 5 - up], [0 * up, up, up**3, -up])
    assert {row["layers"]: row["correlation"] for row in rows} == pytest.approx(
        {"1, 2": 1, "2, 3": -1, "1, 3": -1}
    )
    assert {row["n"] for row in rows} == {2}
    assert "no effect between 2 and 3" in finding
    assert "-1.00 to 1.00" in finding


def test_layers_that_do_not_deviate_have_no_correlation(reused: Any) -> None:
    rows, finding = reused("cacheblend-8", np.ones((4, 10)))
    assert rows == []
    assert "no two layers" in finding


def test_a_tail_of_first_tokens(reused: Any) -> None:
    deviation = np.ones((3, 20))
    deviation[1, [0, 10]] = 9  # 18 of 36
    rows, finding = reused("cacheblend-7", deviation)
    assert [row["layer"] for row in rows] == [1, 2]
    assert rows[0]["top_10_hold"] == pytest.approx(0.5)
    assert (rows[0]["first_in_top_10"], rows[0]["first_in_all"]) == pytest.approx((1, 0.1))
    assert rows[1]["top_10_hold"] == pytest.approx(0.1)
    assert "hold 10% (layer 2) to 50% (layer 1)" in finding
    assert "1.0 to 9.0 times the others' mean: hardly a tail" in finding


@pytest.mark.parametrize("name", ["cacheblend-7", "cacheblend-8"])
def test_nothing_to_measure(reused: Any, name: str) -> None:
    rows, finding = reused(name)
    assert rows == []
    assert finding.endswith(".")
    assert reused(name, np.zeros((6, 1)))[1].endswith(".")
