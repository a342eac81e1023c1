"""Measures EPIC's figure 6: accuracy against time to first token, kind by kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.bench.quality import main_rows
from kvlinker.quality.evaluation.examples import Question
from kvlinker_lab.figures.drawing import family_of, points, score_over_ttft
from kvlinker_lab.figures.epic.tradeoff import front, overall, pick_timed, with_pareto, with_ttft
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.lab import Lab

DATASET = "reader-long"
POLICIES = (
    "full",
    "naive",
    *(f"legolink-{tokens}" for tokens in (2, 4, 8, 16, 32)),
    *(f"attnlink-{tokens}" for tokens in (8, 16)),
    *(f"cacheblend-{ratio}" for ratio in (5, 15, 30)),
    "cachecraft-0.3",
    *(f"query-{ratio}" for ratio in (2, 5, 15)),
    "random-15",
)
EXAMPLES = 70
"""The number of examples, unless ``--limit`` gives another: a multiple of the seven kinds of
questions, which come in turn."""

FORM = "semantic"
EPIC, CACHEBLEND = "attnlink-16", "cacheblend-15"


def _measure(lab: Lab) -> list[Row]:
    asked = lab.examine("accuracy", POLICIES, limit=EXAMPLES, datasets=(DATASET,))
    examples = pick_timed(
        [example for example, _ in asked.answered if isinstance(example, Question)]
    )
    seconds = lab.first_token_times(
        "time to first token", [{FORM: example} for example in examples], POLICIES
    )
    return with_pareto(with_ttft(main_rows(asked.report.rows), examples, seconds, FORM))


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    tasks = list(dict.fromkeys(row["task"] for row in [*overall(rows), *rows]))
    across = -(-len(tasks) // 2)
    panels = canvas.subplots(2, across, squeeze=False, sharey=True)
    for axes, task in zip(panels.flatten(), tasks, strict=False):
        score_over_ttft(axes, [row for row in rows if row["task"] == task], title=task)
    for axes in panels.flatten()[len(tasks) :]:
        axes.set_visible(False)
    for first in panels[:, 0]:
        first.set_ylabel("exact match")
    canvas.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right center")


def _finding(rows: Sequence[Row]) -> str:
    of = {row["policy"]: row for row in overall(rows)}
    full, naive, epic, blend = of["full"], of["naive"], of[EPIC], of[CACHEBLEND]
    by_kind = [row for row in rows if row["policy"] == EPIC]
    worst = min(by_kind, key=lambda row: row["vs_full"])
    best = front(list(of.values()))
    families = {family_of(row["policy"]) for row in best}
    epics = {"legolink", "attnlink"} & families
    on_kind = (
        f"at worst {points(worst['vs_full'])} on {worst['task']}"
        if worst["vs_full"] < 0
        else "on no kind less"
    )
    return " ".join(
        [
            (
                f"over {full['n']} questions, full scores {full['score']:.2f} in"
                f" {full['ttft_ms']:.0f} ms, naive {_against_full(naive)}."
            ),
            f"{EPIC} scores {_against_full(epic)}, {on_kind}.",
            (
                f"{CACHEBLEND} scores {_against_full(blend)}, and takes "
                f"{blend['ttft_ms'] / epic['ttft_ms']:.1f} times as long as {EPIC}."
            ),
            (
                f"On the Pareto front, fastest first: {', '.join(row['policy'] for row in best)}. "
                f"{'EPIC has a place on it' if epics else 'No policy of EPIC is on it'}, "
                f"{'and so has CacheBlend' if 'cacheblend' in families else 'CacheBlend has none'}."
            ),
        ]
    )


def _against_full(row: Row) -> str:
    interval = f"{100 * row['vs_full_low']:+.0f} to {100 * row['vs_full_high']:+.0f}"
    return (
        f"{row['score']:.2f} in {row['ttft_ms']:.0f} ms, {points(row['vs_full'])} from full (95%"
        f" interval {interval}), with {row['recomputed_fraction']:.0%} of the cached tokens"
        " recomputed"
    )


FIGURE = Figure(
    name="epic-6",
    title="Accuracy against time to first token",
    source="EPIC, figure 6",
    claim=(
        "with 20 tokens recomputed at every chunk boundary (AttnLink-20), models of 7 to 9 billion"
        " parameters lose 0% to 7% of accuracy, and the first token comes up to 3 times sooner than"
        " with CacheBlend-15; AttnLink's settings are the new Pareto front."
    ),
    columns=(
        "policy",
        "n",
        "score",
        "ci_low",
        "ci_high",
        "vs_full",
        "recomputed_fraction",
        "timed",
        "ttft_ms",
        "pareto",
    ),
    measure=_measure,
    draw=_draw,
    finding=_finding,
    table=overall,
    size=(13.0, 6.0),
)
register(FIGURE)
