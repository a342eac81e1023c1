"""Measures Cache-Craft's figure 14: how much of a chunk's attention on earlier chunks its top
tokens have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvlinker.quality.bench.harness.report import Row
from kvlinker_lab.figures.cachecraft.earlier_prompts import cache_together, scores_of
from kvlinker_lab.figures.cachecraft.scatter import cumulative_share
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.lab import Lab

EXAMPLES = 210
"""The number of examples, unless ``--limit`` gives another: a multiple of the seven kinds of
questions, which come in turn."""

PERCENTS = tuple(range(0, 101, 5))


def _measure(lab: Lab) -> list[Row]:
    curves = []
    with lab.open_reader(limit=EXAMPLES) as reader:
        for done, example in enumerate(reader.examples):
            lab.progress("scores", done, len(reader.examples))
            chunks = [reader.llm.builder.encode_chunk(passage) for passage in example.passages]
            for chunk in cache_together(reader.llm, chunks, example.question).chunks[1:]:
                curves.append(
                    cumulative_share(
                        scores_of(reader.llm, chunk).inter, [p / 100 for p in PERCENTS]
                    )
                )
    if not curves:
        return []
    low, middle, high = np.quantile(curves, [0.1, 0.5, 0.9], axis=0)
    return [
        {
            "percent": percent,
            "chunks": len(curves),
            "mean_share": float(mean),
            "median_share": float(middle[index]),
            "low_share": float(low[index]),
            "high_share": float(high[index]),
        }
        for index, (percent, mean) in enumerate(zip(PERCENTS, np.mean(curves, axis=0), strict=True))
    ]


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    percents = [row["percent"] for row in rows]

    def shares(column: str) -> list[float]:
        return [100 * row[column] for row in rows]

    axes.plot(percents, shares("mean_share"), marker="o", markersize=4, label="mean over chunks")
    axes.fill_between(
        percents, shares("low_share"), shares("high_share"), alpha=0.2, label="four in five chunks"
    )
    axes.plot((0, 100), (0, 100), color="grey", linestyle=":", label="all tokens alike")
    axes.set(
        xlabel="top tokens, in the order of recomputation (% of the chunk)",
        ylabel="share of the chunk's inter attention (%)",
        xlim=(0, 100),
        ylim=(0, 102),
    )
    axes.legend(loc="lower right")


def _finding(rows: Sequence[Row]) -> str:
    if not rows:
        return "no chunk stood behind another one."
    held = {row["percent"]: row["mean_share"] for row in rows}
    shown = ", ".join(
        f"the top {percent}% have {held[percent]:.0%}" for percent in (10, 20, 30, 50)
    )
    excess = held[30] / 0.3
    verdict = (
        "concentrated as in the paper"
        if held[30] >= 0.5
        else "only weakly concentrated"
        if excess > 1.1
        else "even"
    )
    return (
        f"of the inter attention of {rows[0]['chunks']} chunks, {shown} on average; at 30% that is"
        f" {excess:.1f} times what tokens that are all alike would have. It is {verdict}."
    )


FIGURE = Figure(
    name="cachecraft-14",
    title="Few tokens have most of a chunk's inter attention",
    source="Cache-Craft, figure 14",
    claim=(
        "a small subset of a chunk's tokens, the ones to recompute first, makes up most of its"
        " contextualisation."
    ),
    columns=("percent", "chunks", "mean_share", "low_share", "high_share"),
    measure=_measure,
    draw=_draw,
    finding=_finding,
    table=lambda rows: [row for row in rows if row["percent"] % 10 == 0],
)
register(FIGURE)
