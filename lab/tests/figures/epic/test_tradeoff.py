"""Scores joined with times, and the Pareto front of both."""

from __future__ import annotations

from typing import Any

from kvlinker.quality.evaluation.examples import Question
from kvlinker_lab.figures.epic.tradeoff import front, overall, pick_timed, with_pareto, with_ttft


def point(policy: str, score: float, ttft: float, task: str = "all") -> dict[str, Any]:
    return {"policy": policy, "task": task, "score": score, "ttft_ms": ttft}


def test_the_front_is_what_nothing_beats() -> None:
    rows = [
        point("full", 1.0, 100),
        point("slow", 0.9, 60),
        point("good", 0.9, 50),
        point("bad", 0.4, 20),
    ]
    rows += [point("naive", 0.5, 10), point("twin", 0.5, 10), point("full", 0.1, 100, task="other")]
    marked = with_pareto(rows)
    assert [row["pareto"] for row in marked] == ["yes", "no", "yes", "no", "yes", "yes", "yes"]
    assert [row["policy"] for row in front(marked[:6])] == ["naive", "twin", "good", "full"]
    assert [row["pareto"] for row in rows if "pareto" in row] == []


def test_times_are_means_over_the_examples_of_a_task() -> None:
    examples = [
        Question(str(n), "toy", task, ("p",), "q", ("a",))
        for n, task in enumerate(["odd", "even", "odd"])
    ]
    seconds = [{("cut", "naive"): 0.001 * n, ("whole", "naive"): 9.0} for n in (1, 2, 5)]
    rows = [
        {"policy": "naive", "task": task, "score": 1.0} for task in ("odd", "even", "never", "all")
    ]
    joined = with_ttft(rows, examples, seconds, "cut")
    assert [(row["task"], row["timed"], round(row["ttft_ms"], 6)) for row in joined] == [
        ("odd", 2, 3.0),
        ("even", 1, 2.0),
        ("all", 3, round(8 / 3, 6)),
    ]


def test_all_kinds_in_turn_are_timed() -> None:
    kinds = 7
    assert {number % kinds for number in pick_timed(range(70))} == set(range(kinds))
    assert list(pick_timed([1])) == [1]


def test_overall_rows_of_one_task_are_that_tasks() -> None:
    rows = [point("full", 1, 1, task="single")]
    assert overall(rows) == rows
    assert overall([*rows, point("naive", 1, 1)]) == [point("naive", 1, 1)]
