"""Sets accuracy against time to first token, for EPIC's figures 6 and 9."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TypeVar

from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.evaluation.examples import Example
from kvlinker.quality.evaluation.task_scores import ALL_TASKS

TIMED_SHARE = 5
"""The number of examples of which one is timed. Kinds of examples come in turn, and no number of
kinds is a multiple of it, so that all kinds are timed."""

Asked = TypeVar("Asked")


def pick_timed(examples: Sequence[Asked]) -> Sequence[Asked]:
    """Pick the examples to time: every fifth."""
    return examples[::TIMED_SHARE]


def with_ttft(
    rows: Sequence[Row],
    examples: Sequence[Example],
    seconds: Sequence[Mapping[tuple[str, str], float]],
    form: str,
) -> list[Row]:
    """Add ``ttft_ms`` to quality rows: the mean over the ``pick_timed`` examples of the row's task.

    ``seconds`` are by (form, policy) for each of ``examples``; those of ``form`` count. Tasks
    without an example are left out.
    """
    joined: list[Row] = []
    for row in rows:
        of_task = [
            times[form, row["policy"]]
            for example, times in zip(examples, seconds, strict=True)
            if row["task"] in (example.task, ALL_TASKS)
        ]
        if of_task:
            joined.append({**row, "timed": len(of_task), "ttft_ms": 1e3 * fmean(of_task)})
    return joined


def with_pareto(rows: Sequence[Row]) -> list[Row]:
    """Add ``pareto`` to rows: yes where no other row of the same task is as good and as fast, and
    better in one."""
    return [
        {**row, "pareto": "no" if any(_beats(other, row) for other in rows) else "yes"}
        for row in rows
    ]


def _beats(one: Row, other: Row) -> bool:
    return (
        one["task"] == other["task"]
        and one["score"] >= other["score"]
        and one["ttft_ms"] <= other["ttft_ms"]
        and (one["score"], one["ttft_ms"]) != (other["score"], other["ttft_ms"])
    )


def front(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that are ``pareto``, fastest first."""
    return sorted((row for row in rows if row["pareto"] == "yes"), key=lambda row: row["ttft_ms"])


def overall(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of all tasks together; of a data set with one task, that task's."""
    return [row for row in rows if row["task"] == ALL_TASKS] or list(rows)
