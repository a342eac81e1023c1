"""Crosses policies with the tokens before a chunk while its KV is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlinker.base.types.chunks import GenerationContext
from kvlinker.quality.bench.harness.report import Row
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.frontier import KEPT, describe_cheapest
from kvlinker_lab.figures.lab import Lab

EXAMPLES = 210
"""The number of examples, unless ``--limit`` gives another: a multiple of the seven kinds of
questions, which come in turn."""

POLICIES = (
    *(
        "full",
        "naive",
        "legolink-1",
        "legolink-4",
        "legolink-16",
        "cacheblend-15",
        "cachecraft-0.3",
    ),
    *("query-2", "query-5", "query-15", "random-15"),
)

PANELS = (("anaphora", "score"), ("all", "score"), ("prose", "vs_full"))
"""The tasks that are drawn, each with its metric."""


def _measure(lab: Lab) -> list[Row]:
    rows: list[Row] = []
    for context in GenerationContext:
        settings = {"generation_context": context}
        measured = lab.quality(
            f"context {context}",
            POLICIES,
            limit=EXAMPLES,
            settings=settings,
            datasets=("reader", "prose"),
        )
        rows += [{"context": str(context)} | dict(row) for row in measured]
    return rows


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    panels = canvas.subplots(1, 3, sharey=True)
    for axes, (task, metric) in zip(panels, PANELS, strict=True):
        for offset, context in enumerate(dict.fromkeys(row["context"] for row in rows)):
            shown = [row for row in rows if (row["context"], row["task"]) == (context, task)]
            places = [index + 0.25 * (offset - 1) for index in range(len(shown))]
            low, high = (
                ("ci_low", "ci_high") if metric == "score" else ("vs_full_low", "vs_full_high")
            )
            reach = [
                [row[metric] - row[low] for row in shown],
                [row[high] - row[metric] for row in shown],
            ]
            axes.barh(
                places,
                [row[metric] for row in shown],
                0.25,
                xerr=reach,
                label=context,
                error_kw={"lw": 0.6},
            )
            axes.set_yticks(range(len(shown)), [row["policy"] for row in shown])
        axes.set(
            xlabel="exact match" if metric == "score" else "loss over full (nats per token)",
            title=task,
        )
    panels[0].invert_yaxis()
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def _finding(rows: Sequence[Row]) -> str:
    sentences = []
    for context in dict.fromkeys(row["context"] for row in rows):
        shown = [row for row in rows if (row["context"], row["task"]) == (context, "all")]
        scores = {row["policy"]: row["score"] for row in shown}
        sentences.append(
            f"With `{context}`, full scores {scores['full']:.3f} and naive {scores['naive']:.3f};"
            f" at least {KEPT:.1%} of full is kept by {describe_cheapest(shown)}. On prose, naive"
            f" adds {_prose_loss(rows, context, 'naive')}, legolink-1"
            f" {_prose_loss(rows, context, 'legolink-1')}."
        )
    return " ".join(sentences)


def _prose_loss(rows: Sequence[Row], context: str, policy: str) -> str:
    row = next(
        row
        for row in rows
        if (row["context"], row["task"], row["policy"]) == (context, "prose", policy)
    )
    return (
        f"{row['vs_full']:+.4f} nats per token [{row['vs_full_low']:+.4f},"
        f" {row['vs_full_high']:+.4f}]"
    )


FIGURE = Figure(
    name="contexts",
    title="Generation contexts and policies",
    source="kvlinker's own question",
    claim=(
        "EPIC's code keeps a BOS token in each chunk; APE and Prompt Cache report that a shared"
        " prefix helps."
    ),
    columns=(
        "context",
        "task",
        "policy",
        "n",
        "score",
        "vs_full",
        "vs_full_low",
        "vs_full_high",
        "recomputed_fraction",
    ),
    measure=_measure,
    draw=_draw,
    finding=_finding,
    table=lambda rows: [row for row in rows if row["task"] in ("all", "prose")],
    size=(13.0, 6.0),
)
register(FIGURE)
