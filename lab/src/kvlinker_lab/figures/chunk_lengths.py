"""Measures policies on chunks as long as the papers', windows of 256 and 512 tokens with several
facts in each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.evaluation.contexts import ContextSplit
from kvlinker.quality.evaluation.task_scores import ALL_TASKS
from kvlinker_lab.figures.drawing import score_lines
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.frontier import KEPT, describe_cheapest, keeping_policies
from kvlinker_lab.figures.lab import SEVERAL_PASSAGES, Lab

TASKS = {"reader-long": SEVERAL_PASSAGES, "reader-hard-long": ("chain", "correction", "rule")}
"""The tasks that are asked of each data set."""

LENGTHS = (256, 512)
EXAMPLES = 90
"""The number of examples, unless ``--limit`` gives another."""

POLICIES = (
    *("full", "naive", "query-3"),
    *(f"query-{ratio}-sensitive" for ratio in (1, 2, 3, 5)),
    *("legolink-16", "attnlink-16", "cacheblend-15", "cachecraft-0.3", "random-15"),
)


def _measure(lab: Lab) -> list[Row]:
    rows: list[Row] = []
    for length in LENGTHS:
        for dataset, tasks in TASKS.items():
            rows += [
                {"chunk_tokens": length, **row}
                for row in lab.quality(
                    f"{dataset} in chunks of {length} tokens",
                    POLICIES,
                    limit=EXAMPLES,
                    datasets=(dataset,),
                    tasks=tasks,
                    split=ContextSplit.FIXED,
                    chunk_tokens=length,
                )
            ]
    return rows


def _panels(rows: Sequence[Row]) -> dict[tuple[int, str], list[Row]]:
    """Group the rows by chunk length and data set."""
    panels: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        panels.setdefault((row["chunk_tokens"], row["dataset"]), []).append(row)
    return panels


def _together(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of all tasks together."""
    return [row for row in rows if row["task"] == ALL_TASKS]


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    panels = _panels(rows)
    drawn = canvas.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, ((length, dataset), members) in zip(drawn, panels.items(), strict=True):
        score_lines(axes, _together(members))
        axes.set(title=f"{dataset}, {length} tokens", ylim=(0.7, 1.02))
    drawn[0].set_ylabel("exact match")
    canvas.legend(*drawn[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)


def _finding(rows: Sequence[Row]) -> str:
    sentences = []
    for (length, dataset), members in _panels(rows).items():
        together = _together(members)
        scores = {row["policy"]: row["score"] for row in together}
        sentences.append(
            f"On {dataset} in chunks of {length} tokens, full scores {scores['full']:.2f}, naive"
            f" {scores['naive']:.2f}; {KEPT:.1%} of full is kept by {describe_cheapest(together)},"
            f" and on each kind by {', '.join(keeping_policies(members)) or 'none'}."
        )
    return " ".join(sentences)


FIGURE = Figure(
    name="chunk-lengths",
    title="Chunks of 256 and 512 tokens",
    source="kvlinker's own question",
    claim=(
        "the papers cut documents in chunks of 256 to 512 tokens; kvlinker's own goal is 99.5% of"
        " full's score at 3% recomputed, on every kind of question."
    ),
    columns=(
        "chunk_tokens",
        "dataset",
        "task",
        "policy",
        "n",
        "score",
        "ci_low",
        "ci_high",
        "vs_full",
        "recomputed_fraction",
    ),
    measure=_measure,
    draw=_draw,
    finding=_finding,
    table=_together,
    size=(15.0, 5.5),
)
register(FIGURE)
