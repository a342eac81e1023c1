"""Measures Cache-Craft's figure 26: what its parts are worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlinker.linking import Policy, parse_policy
from kvlinker.quality.bench.harness.report import Row
from kvlinker_lab.figures.cachecraft.earlier_prompts import (
    TASK,
    ContextOrder,
    WithoutOverlap,
    overall,
    quality_of_earlier_chunks,
)
from kvlinker_lab.figures.drawing import reaches
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.lab import Lab

EXAMPLES = 84
"""The number of examples, unless ``--limit`` gives another: a multiple of the seven kinds of
questions, which come in turn."""

ROUGE = "rouge_l_vs_full"

DESIGNS: dict[str, tuple[Policy, ...]] = {
    "Cache-Craft, α from 0.5 to 3": tuple(
        parse_policy(f"cachecraft-{alpha}-focus") for alpha in (0.5, 1, 2, 3)
    ),
    "α = 1 without β": (WithoutOverlap.parse("1-focus"),),
    "α = 1 without focus": (parse_policy("cachecraft-1"),),
    "α = 1 without β and focus": (WithoutOverlap.parse("1"),),
    "fixed share, Cache-Craft's order": tuple(ContextOrder(percent) for percent in (30, 60)),
    "fixed share, random tokens": tuple(parse_policy(f"random-{percent}") for percent in (30, 60)),
    "naive": (parse_policy("naive"),),
}
"""Policies by design; designs are named by what they leave out."""

WHOLE = "cachecraft-1-focus"


def _measure(lab: Lab) -> list[Row]:
    design_of = {policy.name: design for design, policies in DESIGNS.items() for policy in policies}
    policies = [policy for policies in DESIGNS.values() for policy in policies]
    rows = quality_of_earlier_chunks(lab, "ablations", policies, limit=EXAMPLES)
    return [{"design": design_of.get(row["policy"], "full"), **row} for row in rows]


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    panels = canvas.subplots(1, 2, sharey=True)
    for axes, metric, title in zip(
        panels, (ROUGE, TASK), ("against full's own answers", "against the references"), strict=True
    ):
        shown = overall(rows, metric)
        for design, policies in DESIGNS.items():
            points = [shown[policy.name] for policy in policies]
            recomputed = [100 * row["recomputed_fraction"] for row in points]
            style = {
                "marker": "o",
                "markersize": 5,
                "capsize": 2,
                "linestyle": ":",
                "linewidth": 1,
                "label": design,
            }
            axes.errorbar(recomputed, [row["score"] for row in points], reaches(points), **style)
        axes.axhline(shown["full"]["score"], color="grey", linewidth=0.8, label="full")
        axes.set(xlabel="recomputed (% of cached tokens)", title=title, ylim=(0, 1.02))
    panels[0].set_ylabel("ROUGE-L")
    panels[1].set_ylabel("the tasks' own metric")
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)


def _finding(rows: Sequence[Row]) -> str:
    rouge = overall(rows, ROUGE)

    def describe(policy: Policy) -> str:
        row = rouge[policy.name]
        return f"{row['score']:.2f} with {row['recomputed_fraction']:.0%} recomputed"

    whole, alone = rouge[WHOLE], rouge["naive"]
    alphas = ", ".join(describe(policy) for policy in DESIGNS["Cache-Craft, α from 0.5 to 3"])
    left_out = "; ".join(
        f"{design.removeprefix('α = 1 ')}"
        f" {describe(policies[0])}{_apart(rouge[policies[0].name], whole)}"
        for design, policies in DESIGNS.items()
        if design.startswith("α = 1")
    )
    fixed = "; ".join(
        f"{design.removeprefix('fixed share, ')} {describe(DESIGNS[design][1])}"
        for design in ("fixed share, Cache-Craft's order", "fixed share, random tokens")
    )
    return (
        f"ROUGE-L against full's own answers is {alone['score']:.2f} with nothing recomputed. All"
        f" of Cache-Craft reaches, for α = 0.5, 1, 2 and 3, {alphas}. With α = 1: {left_out}. With"
        f" the same share of every chunk in place of CCI·(1 − β′): {fixed}. A part that is left out"
        " changes how much is recomputed, so compare designs at equal shares. Every chunk's KV"
        " comes from an earlier prompt, half of whose chunks were others."
    )


def _apart(row: Row, other: Row) -> str:
    overlapping = row["ci_low"] <= other["ci_high"] and other["ci_low"] <= row["ci_high"]
    return " (intervals overlap)" if overlapping else ""


FIGURE = Figure(
    name="cachecraft-26",
    title="What Cache-Craft's parts are worth",
    source="Cache-Craft, figure 26",
    claim=(
        "on 2WikiMQA, ROUGE-L grows with α (0.825 for 0.5, 0.896 for 1 at 30% recomputed, 0.94 for"
        " 2, 0.953 for 3) from 0.665 with nothing recomputed. Without β, 54% is recomputed and"
        " without focus 70%, at hardly better quality; random tokens in place of CCI give 0.73."
    ),
    columns=(
        "design",
        "policy",
        "metric",
        "n",
        "score",
        "ci_low",
        "ci_high",
        "recomputed_fraction",
    ),
    measure=_measure,
    draw=_draw,
    finding=_finding,
    table=lambda rows: list(overall(rows, ROUGE).values()),
    size=(11.0, 4.8),
)
register(FIGURE)
