"""Measures Cache-Craft's figure 20: quality against the share of tokens recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlinker.quality.bench.harness.report import Row
from kvlinker_lab.figures.cachecraft.earlier_prompts import TASK, overall, quality_of_earlier_chunks
from kvlinker_lab.figures.drawing import score_lines
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.lab import Lab

EXAMPLES = 105
"""The number of examples, unless ``--limit`` gives another: a multiple of the seven kinds of
questions, which come in turn."""

ALPHAS = ("0.25", "0.5", "1", "2")
SHARES = (15, 30, 60)
POLICIES = (
    *(f"cachecraft-{alpha}" for alpha in ALPHAS),
    *(f"cachecraft-{alpha}-focus" for alpha in ("1", "2")),
    *(f"{control}-{percent}" for control in ("h2o", "random") for percent in SHARES),
    "naive",
    "set-prefix",
    "prefix",
)
ROUGE = "rouge_l_vs_full"


def _measure(lab: Lab) -> list[Row]:
    return quality_of_earlier_chunks(lab, "quality sweep", POLICIES, limit=EXAMPLES)


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    panels = canvas.subplots(1, 2, sharey=True)
    for axes, metric, title in zip(
        panels, (ROUGE, TASK), ("against full's own answers", "against the references"), strict=True
    ):
        score_lines(axes, list(overall(rows, metric).values()))
        axes.set(title=title)
    panels[0].set_ylabel("ROUGE-L")
    panels[1].set_ylabel("the tasks' own metric")
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=8)


def _finding(rows: Sequence[Row]) -> str:
    rouge, own = overall(rows, ROUGE), overall(rows, TASK)

    def describe(policy: str) -> str:
        return (
            f"{rouge[policy]['score']:.2f} at {rouge[policy]['recomputed_fraction']:.0%} ({policy})"
        )

    crafted = ", ".join(describe(f"cachecraft-{alpha}") for alpha in ALPHAS)
    controls = ", ".join(describe(f"{control}-30") for control in ("h2o", "random"))
    alone = rouge["naive"]
    gains = [alpha for alpha in ALPHAS if rouge[f"cachecraft-{alpha}"]["ci_low"] > alone["ci_high"]]
    clear = (
        f"from α = {gains[0]} on its interval lies above naive's"
        if gains
        else "no α's interval lies above naive's"
    )
    return (
        f"ROUGE-L against full's own answers is {alone['score']:.2f} with nothing recomputed"
        f" (naive), and with Cache-Craft {crafted}; {clear}. The controls: {controls}. Prefix"
        f" caching recomputes {rouge['prefix']['recomputed_fraction']:.0%}; reordering the chunks"
        f" for it (set-prefix) {rouge['set-prefix']['recomputed_fraction']:.0%}, at"
        f" {rouge['set-prefix']['score']:.2f}. By the tasks' own metric, full scores"
        f" {own['full']['score']:.2f}, naive {own['naive']['score']:.2f} and cachecraft-1"
        f" {own['cachecraft-1']['score']:.2f}. Every chunk's KV comes from an earlier prompt, half"
        " of whose chunks were others."
    )


FIGURE = Figure(
    name="cachecraft-20",
    title="Quality of Cache-Craft against the share recomputed",
    source="Cache-Craft, figure 20",
    claim=(
        "with LLaMA-3-8B on multi-hop questions, ROUGE-L against full's answers is 0.65 without"
        " recomputation, 30% better with 20% of the tokens recomputed and 42% better with 30%;"
        " random tokens can be worse than none, and the most attended ones (H2O) are 2% to 10%"
        " better than none. Prefix caching computes 80% to 95% of the tokens."
    ),
    columns=("policy", "metric", "n", "score", "ci_low", "ci_high", "recomputed_fraction"),
    measure=_measure,
    draw=_draw,
    finding=_finding,
    table=lambda rows: [*overall(rows, ROUGE).values()],
    size=(11.0, 4.6),
)
register(FIGURE)
