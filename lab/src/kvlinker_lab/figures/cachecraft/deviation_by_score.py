"""Measures Cache-Craft's figure 12: how far reused chunks are off, against the scores that are to
foretell it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlinker.quality.bench.harness.report import Row
from kvlinker_lab.figures.cachecraft.new_contexts import ORDERS, OTHERS, PARTS, reuses
from kvlinker_lab.figures.cachecraft.scatter import make_bins
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.lab import Lab
from kvlinker_lab.statistics import Correlation, grouped_correlation

EXAMPLES = 50
"""The number of examples, unless ``--limit`` gives another."""

BINS = 5
"""The bins of scores, with equally many points each."""

PANELS = {
    "cci": (OTHERS, "CCI", "behind other chunks (β = 0)"),
    "1-beta": (PARTS, "1 − β", "behind some of the old chunks (γ = 0)"),
    "1-gamma": (ORDERS, "1 − γ", "behind the old chunks reordered (β = 1)"),
}
"""For each score, the kind of new contexts that it is looked at in, its label, and the panel's
title."""


def _measure(lab: Lab) -> list[Row]:
    return [
        {
            "kind": reuse.kind,
            "example": reuse.example,
            "tokens": reuse.tokens,
            "cci": reuse.cci,
            "1-beta": 1 - reuse.beta,
            "1-gamma": 1 - reuse.gamma,
            "cci(1-beta')": reuse.cci * (1 - reuse.beta * (1 - reuse.gamma)),
            "outside": reuse.outside,
            "deviation": reuse.deviations[0],
        }
        for reuse in reuses(lab, limit=EXAMPLES)
    ]


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    panels = canvas.subplots(1, len(PANELS), sharey=True)
    for axes, (score, (kind, label, title)) in zip(panels, PANELS.items(), strict=True):
        x, y = _points(rows, kind, score)
        axes.scatter(
            x, y, 8, alpha=0.35, color="tab:blue", linewidths=0, label="a chunk in a new context"
        )
        bins = make_bins(x, y, BINS)
        reach = [
            [one.y - one.interval.low for one in bins],
            [one.interval.high - one.y for one in bins],
        ]
        means = {"marker": "o", "capsize": 3, "color": "tab:red", "label": "mean"}
        axes.errorbar([one.x for one in bins], [one.y for one in bins], reach, **means)
        axes.set(xlabel=label, title=title, ylim=(0, None))
    panels[0].set_ylabel("relative KV deviation")
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)


def _finding(rows: Sequence[Row]) -> str:
    cci, beta, gamma = (_correlation(rows, kind, score) for score, (kind, _, _) in PANELS.items())
    outside, length = _correlation(rows, OTHERS, "outside"), _correlation(rows, OTHERS, "tokens")
    return (
        "how far the KV of a chunk that is reused without repair is off from a full prefill (mean"
        " relative deviation over its tokens and all layers) was compared with each score by rank"
        f" correlation. CCI: {cci}. 1 − β: {beta}. 1 − γ: {gamma}. All in one, CCI·(1 − β′):"
        f" {_correlation(rows, None, _ALL)}. The equations expect more deviation with CCI and 1 −"
        " β, less with 1 − γ. CCI weighs attention per pair of tokens; behind other chunks, the"
        f" plain share of a chunk's attention that went to earlier chunks has {outside}, and its"
        f" length {length}. In brackets: 95% intervals over examples."
    )


def _table(rows: Sequence[Row]) -> list[Row]:
    return [
        {
            "score": score,
            "mean_score": one.x,
            "chunks": one.n,
            "deviation": one.y,
            "ci_low": one.interval.low,
            "ci_high": one.interval.high,
        }
        for score, (kind, _, _) in PANELS.items()
        for one in make_bins(*_points(rows, kind, score), BINS)
    ]


def _points(rows: Sequence[Row], kind: str | None, score: str) -> tuple[list[float], list[float]]:
    """Return score and deviation of all chunks, or of those in new contexts of one kind."""
    shown = [row for row in rows if kind in (None, row["kind"])]
    return [row[score] for row in shown], [row["deviation"] for row in shown]


def _correlation(rows: Sequence[Row], kind: str | None, score: str) -> Correlation:
    return grouped_correlation(
        *_points(rows, kind, score), [row["example"] for row in rows if kind in (None, row["kind"])]
    )


_ALL = "cci(1-beta')"

FIGURE = Figure(
    name="cachecraft-12",
    title="Deviation against CCI, prefix overlap and order",
    source="Cache-Craft, figure 12",
    claim=(
        "the output of a reused chunk deviates the more, the more it was contextualised (CCI), the"
        " less of its old prefix stands before it (1 − β), and the more that is reordered (γ)."
    ),
    columns=("score", "mean_score", "chunks", "deviation", "ci_low", "ci_high"),
    measure=_measure,
    draw=_draw,
    finding=_finding,
    table=_table,
    size=(12.0, 4.4),
)
register(FIGURE)
