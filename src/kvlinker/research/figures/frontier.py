"""Finds the cheapest policy that keeps a full prefill's answers, on the questions that suffer from linking."""

from __future__ import annotations

from collections.abc import Sequence

from kvlinker.research.bench.harness.report import Row
from kvlinker.research.evaluation.task_scores import ALL_TASKS
from kvlinker.research.figures.drawing import by_family, quality_over_recomputed
from kvlinker.research.figures.figure import Figure, register
from kvlinker.research.figures.lab import Lab

TASKS = ("bridge", "anaphora")
SHOWN = (*TASKS, ALL_TASKS)
"""The tasks, and both together."""

EXAMPLES = 200
KEPT = 0.98
"""Share of full's score that a policy has to keep."""

POLICIES = (
    *("full", "naive"),
    *(f"query-{ratio}" for ratio in (1, 2, 3, 5, 10, 15)),
    *(f"random-{ratio}" for ratio in (5, 15, 30, 50)),
    *(f"legolink-{tokens}" for tokens in (1, 4, 16)),
    *("attnlink-16", "cacheblend-15", "cacheblend-30", "cacheblend-15-onestep", "cachecraft-0.3", "h2o-15"),
)


def _measure(lab: Lab) -> list[Row]:
    return lab.quality("frontier", POLICIES, limit=EXAMPLES, tasks=TASKS)


def cheapest_by_family(rows: Sequence[Row], kept: float = KEPT) -> dict[str, Row]:
    """Return, by family of policies, the row with the smallest recomputed share that keeps ``kept`` of full's score.

    ``rows`` are of one task. Families that keep it nowhere are missing, and so are full and naive.
    """
    full = next(row["score"] for row in rows if row["policy"] == "full")
    enough = [row for row in rows if row["policy"] not in ("full", "naive") and row["score"] >= kept * full]
    return {
        family: min(members, key=lambda row: row["recomputed_fraction"])
        for family, members in by_family(enough).items()
    }


def told_cheapest(rows: Sequence[Row], kept: float = KEPT) -> str:
    """Name the policies of ``cheapest_by_family`` in a few words, the cheapest first."""
    cheapest = sorted(cheapest_by_family(rows, kept).values(), key=lambda row: row["recomputed_fraction"])
    return ", ".join(f"{row['policy']} ({row['recomputed_fraction']:.1%} recomputed)" for row in cheapest) or "none"


def _finding(rows: Sequence[Row]) -> str:
    sentences = []
    for task in dict.fromkeys(row["task"] for row in rows):
        shown = [row for row in rows if row["task"] == task]
        scores = {row["policy"]: row["score"] for row in shown}
        of = "Both together" if task == ALL_TASKS else task.capitalize()
        sentences.append(
            f"{of}: full scores {scores['full']:.2f}, naive {scores['naive']:.2f}; at least {KEPT:.0%} of full is kept "
            f"by {told_cheapest(shown)}."
        )
    return " ".join(sentences)


FIGURE = Figure(
    name="frontier",
    title="What it takes to keep the answers",
    source="kvlinker's own goal",
    claim="at least 98% of full's score at 5% recomputed, on questions where naive linking loses 20 points or more.",
    columns=("task", "policy", "n", "score", "ci_low", "ci_high", "vs_full", "vs_full_low", "recomputed_fraction"),
    measure=_measure,
    draw=lambda canvas, rows: quality_over_recomputed(canvas, rows, tasks=SHOWN),
    finding=_finding,
    size=(13.0, 5.0),
)
register(FIGURE)
