"""What EPIC's figures say of hand-made measurements, and how few of them they survive."""

from __future__ import annotations

from typing import Any

import pytest

from kvlinker.quality.evaluation.examples import ExampleAnswer, Question
from kvlinker_lab.figures.epic import accuracy, chunk_cuts, context_length
from kvlinker_lab.figures.epic.chunk_cuts import POLICIES, _change, _pairs
from kvlinker_lab.figures.epic.tradeoff import with_pareto

POWERS = {"full": 2.0, "cacheblend-15": 1.5, "attnlink-16": 1.0, "legolink-16": 1.0, "naive": 0.5}


def length_rows(*chunks: int) -> list[dict[str, Any]]:
    return [
        {
            "policy": policy,
            "engine": "embedded",
            "context_tokens": 512 * number + 32,
            "chunks": number,
            "ttft_ms": (512 * number + 32) ** power,
        }
        for number in chunks
        for policy, power in POWERS.items()
        if policy != "full" or number <= context_length.FULL_CHUNKS
    ]


def test_powers_of_the_length_are_found() -> None:
    said = context_length.FIGURE.finding(length_rows(1, 2, 4, 8, 16))
    assert "from 1056 to 4128 tokens" in said
    assert (
        "full 2.00, cacheblend-15 1.50, attnlink-16 1.00, legolink-16 1.00, naive 0.50 (1 is linear"
        in said
    )
    assert "to 8224 tokens the powers are: cacheblend-15 1.50, attnlink-16 1.00" in said
    assert f"takes {8224**0.5:.1f} times as long" in said


@pytest.mark.parametrize("chunks", [(1,), (1, 2), (16, 8)])
def test_few_lengths_have_no_law(chunks: tuple[int, ...]) -> None:
    assert "too few lengths" in context_length.FIGURE.finding(length_rows(*chunks))


def test_the_table_has_a_row_per_length() -> None:
    first, last = context_length.FIGURE.table_rows(length_rows(8, 16))
    assert (first["tokens"], first["full"]) == (4128, 4128**2)
    assert (last["tokens"], last["full"], last["attnlink-16"]) == (8224, None, 8224)


def quality_row(policy: str, task: str = "all", **changes: Any) -> dict[str, Any]:
    row = {
        "policy": policy,
        "task": task,
        "n": 1,
        "score": 1.0,
        "ci_low": 1.0,
        "ci_high": 1.0,
        "timed": 1,
    }
    row |= {
        "vs_full": 0.0,
        "vs_full_low": 0.0,
        "vs_full_high": 0.0,
        "recomputed_fraction": 0.5,
        "ttft_ms": 10.0,
    }
    return row | changes


def test_the_tradeoff_names_front_and_worst_kind() -> None:
    rows = [quality_row(policy) for policy in ("full", "naive", "cacheblend-15")]
    rows += [
        quality_row("attnlink-16", ttft_ms=5.0),
        quality_row("attnlink-16", task="bridge", vs_full=-0.25),
    ]
    said = accuracy.FIGURE.finding(with_pareto(rows))
    assert "at worst -25.0 points on bridge" in said
    assert "takes 2.0 times as long as attnlink-16" in said
    assert "fastest first: attnlink-16. EPIC has a place on it, CacheBlend has none." in said


def answered(
    example: str, text: str, task: str = "t"
) -> tuple[Question, tuple[ExampleAnswer, ...]]:
    asked = Question(example, "toy", task, ("p",), "q", ("right",), metric="exact_match")
    return asked, (ExampleAnswer(asked.digest, "naive", 1, 1, 1.0, 0.0, text, 1.0, 0.0),)


def test_cuts_are_compared_on_the_same_examples() -> None:
    semantic = [
        answered("1", "right"),
        answered("2", "wrong"),
        answered("3", "right", task="u"),
        answered("4", "right"),
    ]
    fixed = [answered("3", "wrong", task="u"), answered("2", "wrong"), answered("1", "right")]
    pairs = _pairs(semantic, fixed)
    assert [(one[0].id, other[0].id) for one, other in pairs] == [
        ("1", "1"),
        ("2", "2"),
        ("3", "3"),
    ]
    whole = _change(pairs, quality_row("naive"))
    assert whole["vs_semantic"] == pytest.approx(-1 / 3)
    assert whole["vs_semantic_low"] == -1
    assert whole["vs_semantic_high"] == 0
    assert _change(pairs, quality_row("naive", task="t"))["vs_semantic"] == 0


def test_splitting_says_what_is_clear() -> None:
    rows = []
    for split in ("semantic", "fixed"):
        for policy in POLICIES:
            change = -0.5 if policy == "naive" else 0.1
            changes: dict[str, Any] = {
                "vs_semantic": change,
                "vs_semantic_low": change - 0.2,
                "vs_semantic_high": change + 0.2,
            }
            rows.append({"split": split, "chunks": 3.0} | quality_row(policy, **changes))
    said = chunk_cuts.FIGURE.finding(with_pareto(rows))
    assert "naive -50.0 points (-70 to -30)" in said
    assert said.endswith(
        "fastest first: "
        + ", ".join(f"{p} ({s})" for s in ("semantic", "fixed") for p in POLICIES)
        + "."
    )
    assert "full +10.0 points (-10 to +30; no clear effect)" in said
