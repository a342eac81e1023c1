"""What stands before a chunk while its KV is computed, crossed with the policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlinker.bench.report import Row
from kvlinker.chunks import GenerationContext
from kvlinker.figures.figure import Figure
from kvlinker.figures.frontier import KEPT, told_cheapest
from kvlinker.figures.lab import Lab

EXAMPLES = 210
POLICIES = (
    *("full", "naive", "legolink-1", "legolink-4", "legolink-16", "cacheblend-15", "cachecraft-0.3"),
    *("query-2", "query-5", "query-15", "random-15"),
)


def _measure(lab: Lab) -> list[Row]:
    rows: list[Row] = []
    for context in GenerationContext:
        settings = {"generation_context": context}
        measured = lab.quality(f"context {context}", POLICIES, limit=EXAMPLES, settings=settings)
        rows += [{"context": str(context)} | dict(row) for row in measured]
    return rows


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    panels = canvas.subplots(1, 2, sharey=True)
    for axes, task in zip(panels, ("anaphora", "all"), strict=True):
        for offset, context in enumerate(contexts):
            shown = [row for row in rows if (row["context"], row["task"]) == (context, task)]
            places = [index + 0.25 * (offset - 1) for index in range(len(shown))]
            reach = [[row["score"] - row["ci_low"] for row in shown], [row["ci_high"] - row["score"] for row in shown]]
            axes.barh(places, [row["score"] for row in shown], 0.25, xerr=reach, label=context, error_kw={"lw": 0.6})
            axes.set_yticks(range(len(shown)), [row["policy"] for row in shown])
        axes.set(xlabel="score", title=task, xlim=(0, 1.02))
    panels[0].invert_yaxis()
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def _finding(rows: Sequence[Row]) -> str:
    sentences = []
    for context in dict.fromkeys(row["context"] for row in rows):
        shown = [row for row in rows if (row["context"], row["task"]) == (context, "all")]
        scores = {row["policy"]: row["score"] for row in shown}
        sentences.append(
            f"With `{context}`, full scores {scores['full']:.3f} and naive {scores['naive']:.3f}; at least {KEPT:.0%} "
            f"of full is kept by {told_cheapest(shown)}."
        )
    return " ".join(sentences)


FIGURE = Figure(
    name="contexts",
    title="Generation contexts and policies",
    source="kvlinker's own question",
    claim="EPIC's code keeps a BOS token in each chunk; APE and Prompt Cache report that a shared prefix helps.",
    columns=("context", "task", "policy", "n", "score", "ci_low", "ci_high", "vs_full", "recomputed_fraction", "kl"),
    measure=_measure,
    draw=_draw,
    finding=_finding,
    table=lambda rows: [row for row in rows if row["task"] == "all"],
    size=(11.0, 6.0),
)
