"""Finds the cheapest policy that keeps a full prefill's answers, on the questions that suffer from
linking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.evaluation.task_scores import ALL_TASKS
from kvlinker_lab.figures.drawing import by_family, score_lines
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.lab import SEVERAL_PASSAGES, Lab

HARD = "reader-hard"
DATASETS = ("reader", HARD)
EXAMPLES = {"reader": 300, HARD: 300}
"""The number of questions of each data set; of ``reader`` those whose answers need several passages
are asked."""

KEPT = 0.995
"""Share of full's score that a policy has to keep."""

POLICIES = (
    *("full", "naive"),
    *(f"query-{ratio}" for ratio in (1, 2, 3, 5, 10)),
    *(f"query-{ratio}-sensitive" for ratio in (1, 2, 3, 5)),
    *(f"random-{ratio}" for ratio in (5, 15, 50)),
    *(f"legolink-{tokens}" for tokens in (1, 4, 16)),
    *(
        "attnlink-16",
        "cacheblend-15",
        "cacheblend-30",
        "cacheblend-15-onestep",
        "cachecraft-0.3",
        "h2o-15",
    ),
)


class Published(NamedTuple):
    """Holds figures that the authors of another system report of it, on other models and other
    questions."""

    name: str
    recomputed: float
    """The percent of the cached tokens that were recomputed."""
    kept: tuple[float, float]
    """The lowest and the highest share of the full prefill's score that is reported."""


PUBLISHED = (
    Published("ProphetKV (arXiv 2602.02579)", 20, (0.96, 1.01)),
    Published("InfoFlow KV (Qwen3-14B, three multi-hop sets)", 15, (0.91, 1.005)),
    Published("CacheClip (arXiv 2510.10129), at most on two sets", 20, (0.85, 0.948)),
)
"""FusionRAG (arXiv 2601.12904: less than 15%) and QCFuse (arXiv 2606.05875) report no share of
full's score."""


def _measure(lab: Lab) -> list[Row]:
    rows: list[Row] = []
    for dataset in DATASETS:
        tasks = () if dataset == HARD else SEVERAL_PASSAGES
        rows += lab.quality(
            f"frontier, {dataset}",
            POLICIES,
            limit=EXAMPLES[dataset],
            datasets=(dataset,),
            tasks=tasks,
        )
    return rows


def cheapest_by_family(rows: Sequence[Row], kept: float = KEPT) -> dict[str, Row]:
    """Return, by family of policies, the row with the smallest recomputed share that keeps ``kept``
    of full's score.

    ``rows`` are of one task. Families that keep it nowhere are missing, and so are full and naive.
    """
    full = next(row["score"] for row in rows if row["policy"] == "full")
    enough = [
        row
        for row in rows
        if row["policy"] not in ("full", "naive") and row["score"] >= kept * full
    ]
    return {
        family: min(members, key=lambda row: row["recomputed_fraction"])
        for family, members in by_family(enough).items()
    }


def describe_cheapest(rows: Sequence[Row], kept: float = KEPT) -> str:
    """Name the policies of ``cheapest_by_family`` in a few words, the cheapest first."""
    cheapest = sorted(
        cheapest_by_family(rows, kept).values(), key=lambda row: row["recomputed_fraction"]
    )
    return (
        ", ".join(
            f"{row['policy']} ({row['recomputed_fraction']:.1%} recomputed)" for row in cheapest
        )
        or "none"
    )


def keeping_policies(rows: Sequence[Row], kept: float = KEPT) -> list[str]:
    """Name the policies that keep ``kept`` of full's score in every task of ``rows``, in their
    order."""
    full = {row["task"]: row["score"] for row in rows if row["policy"] == "full"}
    lacking = {row["policy"] for row in rows if row["score"] < kept * full[row["task"]]}
    return [
        policy
        for policy in dict.fromkeys(row["policy"] for row in rows)
        if policy not in {"full", *lacking}
    ]


def _finding(rows: Sequence[Row]) -> str:
    sentences = []
    for dataset in DATASETS:
        shown = [row for row in rows if row["dataset"] == dataset]
        together = [row for row in shown if row["task"] == ALL_TASKS]
        scores = {row["policy"]: row["score"] for row in together}
        sentences.append(
            f"On {dataset}, full scores {scores['full']:.2f}, naive {scores['naive']:.2f};"
            f" {KEPT:.1%} of full is kept by {describe_cheapest(together)}, and on each of its"
            f" kinds by {', '.join(keeping_policies(shown)) or 'none'}."
        )
    return " ".join(sentences)


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    """Draw a panel per data set, and one of both as shares of full's score, with the figures of
    other systems' authors."""
    together = [row for row in rows if row["task"] == ALL_TASKS]
    *panels, shares = canvas.subplots(1, len(DATASETS) + 1)
    for axes, dataset in zip(panels, DATASETS, strict=True):
        score_lines(axes, [row for row in together if row["dataset"] == dataset])
        axes.set(title=dataset)
    panels[0].set_ylabel("exact match")
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    for dataset, marker in zip(DATASETS, "o^", strict=True):
        own = [row for row in together if row["dataset"] == dataset]
        full = next(row["score"] for row in own if row["policy"] == "full")
        for family, members in by_family(own).items():
            if full and family in ("query", "query-sensitive"):
                points = [
                    (100 * row["recomputed_fraction"], row["score"] / full) for row in members
                ]
                shares.plot(*zip(*points, strict=True), marker=marker, label=f"{family}, {dataset}")
    for each, colour in zip(PUBLISHED, ("black", "grey", "silver"), strict=True):
        shares.plot(
            [each.recomputed] * 2,
            each.kept,
            color=colour,
            marker="_",
            linestyle="none",
            label=each.name,
        )
    shares.set(
        xlabel="recomputed (% of cached tokens)",
        title="share of full's score",
        xlim=(0, 21),
        ylim=(0.6, 1.05),
    )
    shares.legend(fontsize=7, loc="lower right")


FIGURE = Figure(
    name="frontier",
    title="What it takes to keep the answers",
    source="kvlinker's own goal",
    claim=(
        "at least 99.5% of full's score at 3% recomputed, on every kind of question. Others report"
        " of themselves, with other models and questions: ProphetKV 96 to 101% at 20%, InfoFlow KV"
        " 91 to 100% at about 15% (Qwen3-14B, three multi-hop sets), CacheClip up to 95% and 85% at"
        " 20%; FusionRAG recomputes less than 15%."
    ),
    columns=(
        "dataset",
        "task",
        "policy",
        "n",
        "score",
        "ci_low",
        "ci_high",
        "vs_full",
        "recomputed_fraction",
        "kl",
    ),
    measure=_measure,
    draw=_draw,
    finding=_finding,
    size=(15.0, 5.5),
)
register(FIGURE)
