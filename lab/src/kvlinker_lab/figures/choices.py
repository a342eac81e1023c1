"""Measures whether a model that chooses between two answers keeps its choice, which accuracy may
hide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.evaluation.task_scores import ALL_TASKS
from kvlinker_lab.figures.drawing import score_lines
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.lab import Lab

DATASET = "reader-choice"
EXAMPLES = 300
"""The number of examples, unless ``--limit`` gives another."""

POLICIES = (
    *("full", "naive", "query-5"),
    *(f"query-{ratio}-sensitive" for ratio in (1, 2, 3, 5)),
    *("legolink-4", "legolink-16", "cacheblend-15", "random-15"),
)
KEPT = "exact_match_vs_full"


def _measure(lab: Lab) -> list[Row]:
    rows = lab.examine("choices", POLICIES, limit=EXAMPLES, datasets=(DATASET,)).report.rows
    kept = {(row["task"], row["policy"]): row for row in rows if row["metric"] == KEPT}
    return [
        {**row, **_rename_columns(kept[row["task"], row["policy"]])} for row in rows if row["main"]
    ]


def _rename_columns(row: Row) -> Row:
    """Name the columns of the kept share, beside those of the score."""
    return {"kept": row["score"], "kept_low": row["ci_low"], "kept_high": row["ci_high"]}


def _as_score(row: Row) -> Row:
    """Name the kept share as a plot takes it."""
    return {"score": row["kept"], "ci_low": row["kept_low"], "ci_high": row["kept_high"]}


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    panels = canvas.subplots(1, 2, sharey=True)
    together = [row for row in rows if row["task"] == ALL_TASKS]
    score_lines(panels[0], together)
    panels[0].set(title="right choice", ylabel="share of questions")
    score_lines(panels[1], [{**row, **_as_score(row)} for row in together])
    panels[1].set(title="the same choice as full", ylim=(0.7, 1.02))
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)


def _finding(rows: Sequence[Row]) -> str:
    of = {row["policy"]: row for row in rows if row["task"] == ALL_TASKS}
    parts = [
        f"{name} chooses right in {row['score']:.1%} and as full in {row['kept']:.1%}"
        f" [{row['kept_low']:.1%}, {row['kept_high']:.1%}]"
        for name, row in of.items()
        if name != "full"
    ]
    return (
        f"of {of['full']['n']} choices full makes {of['full']['score']:.1%} right;"
        f" {'; '.join(parts)}."
    )


FIGURE = Figure(
    name="choices",
    title="Whether a choice between two answers is kept",
    source="kvlinker's own question",
    claim=(
        "judges that read candidates from reused KV change their choice although accuracy stays"
        " (arXiv 2601.08343)."
    ),
    columns=(
        "task",
        "policy",
        "n",
        "score",
        "ci_low",
        "ci_high",
        "kept",
        "kept_low",
        "kept_high",
        "recomputed_fraction",
    ),
    measure=_measure,
    draw=_draw,
    finding=_finding,
    size=(10.0, 5.0),
)
register(FIGURE)
