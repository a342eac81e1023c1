"""Measures EPIC's figure 9: accuracy and time to first token with chunks cut by meaning and by
length."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.bench.quality import Examined, main_rows
from kvlinker.quality.evaluation.contexts import ContextSplit
from kvlinker.quality.evaluation.examples import Question
from kvlinker.quality.evaluation.statistics import mean_interval
from kvlinker.quality.evaluation.task_scores import ALL_TASKS, main_score
from kvlinker_lab.figures.drawing import points, score_over_ttft
from kvlinker_lab.figures.epic.tradeoff import front, overall, pick_timed, with_pareto, with_ttft
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.lab import Lab

DATASET = "reader"
POLICIES = ("full", "naive", "legolink-4", "legolink-16", "attnlink-16", "cacheblend-15", "query-5")
SPLITS = tuple(ContextSplit)
SEMANTIC, FIXED = SPLITS
WINDOW = 64
"""The tokens of a chunk of fixed size: two or three of the data's passages."""
EXAMPLES = 105
"""The number of examples, unless ``--limit`` gives another: a multiple of the seven kinds of
questions, which come in turn."""

KINDS = ("single", "anaphora")
"""Tasks that are shown beside all together: windows cut sentences of the first, and join passages
of the second."""
EPIC, CACHEBLEND = "attnlink-16", "cacheblend-15"


def _measure(lab: Lab) -> list[Row]:
    asked = {
        split: lab.examine(
            f"accuracy, {split} chunks",
            POLICIES,
            limit=EXAMPLES,
            datasets=(DATASET,),
            split=split,
            chunk_tokens=WINDOW,
        )
        for split in SPLITS
    }
    pairs = _pairs(asked[SEMANTIC].answered, asked[FIXED].answered)
    forms: list[dict[str, Question]] = [
        {SEMANTIC: semantic, FIXED: fixed}
        for (semantic, _), (fixed, _) in pick_timed(pairs)
        if isinstance(semantic, Question) and isinstance(fixed, Question)
    ]
    seconds = lab.first_token_times("time to first token", forms, POLICIES)
    rows: list[Row] = []
    for split in SPLITS:
        measured = with_ttft(
            main_rows(asked[split].report.rows), [form[split] for form in forms], seconds, split
        )
        for row in measured:
            chunks = _chunks(asked[split].answered, row["task"])
            change = _change(pairs, row) if split is FIXED else {}
            rows.append({"split": str(split), **row, "chunks": chunks, **_UNCHANGED, **change})
    return with_pareto(rows)  # of both ways to cut


_UNCHANGED: Row = dict.fromkeys(("vs_semantic", "vs_semantic_low", "vs_semantic_high"))


def _pairs(
    semantic: Sequence[Examined], fixed: Sequence[Examined]
) -> list[tuple[Examined, Examined]]:
    """Pair the same examples, cut in both ways; those that were asked one way only are left out."""
    other = {example.id: (example, results) for example, results in fixed}
    return [(answered, other[answered[0].id]) for answered in semantic if answered[0].id in other]


def _change(pairs: Sequence[tuple[Examined, Examined]], row: Row) -> Row:
    """Measure what fixed windows add to the score of the row's policy, with the interval of the
    paired differences."""
    differences = [
        _score(fixed, row["policy"]) - _score(semantic, row["policy"])
        for semantic, fixed in pairs
        if row["task"] in (semantic[0].task, ALL_TASKS)
    ]
    low, high = mean_interval(differences)
    return {"vs_semantic": fmean(differences), "vs_semantic_low": low, "vs_semantic_high": high}


def _score(answered: Examined, policy: str) -> float:
    example, results = answered
    return next(main_score(example, result) for result in results if result.policy == policy)


def _chunks(answered: Sequence[Examined], task: str) -> float:
    """Return the mean number of chunks in a prompt of the task."""
    return fmean(
        len(example.passages) for example, _ in answered if task in (example.task, ALL_TASKS)
    )


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    whole = overall(rows)
    tasks = list(
        dict.fromkeys(
            row["task"] for row in [*whole, *rows] if row in whole or row["task"] in KINDS
        )
    )
    panels = canvas.subplots(len(tasks), len(SPLITS), squeeze=False, sharex="row", sharey=True)
    for line, task in zip(panels, tasks, strict=True):
        for axes, split in zip(line, SPLITS, strict=True):
            shown = [row for row in rows if (row["task"], row["split"]) == (task, split)]
            score_over_ttft(axes, shown, title=f"{task}, {split} chunks")
        line[0].set_ylabel("exact match")
    canvas.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right center")


def _finding(rows: Sequence[Row]) -> str:
    of = {(row["split"], row["policy"]): row for row in overall(rows)}
    fixed = {policy: of[FIXED, policy] for policy in POLICIES}
    ours, theirs = of[SEMANTIC, EPIC], fixed[CACHEBLEND]
    best = ", ".join(f"{row['policy']} ({row['split']})" for row in front(list(of.values())))
    by_kind = [
        row
        for row in rows
        if row["task"] in KINDS and (row["split"], row["policy"]) == (FIXED, "naive")
    ]
    return " ".join(
        [
            (
                f"windows of {WINDOW} tokens make {fixed['full']['chunks']:.0f} chunks of a prompt,"
                f" its own passages {of[SEMANTIC, 'full']['chunks']:.0f}. Over {fixed['full']['n']}"
                " questions, windows change the score by"
                f" {'; '.join(f'{name} {_describe_change(row)}' for name, row in fixed.items())}."
            ),
            *(f"On {row['task']}, naive changes {_describe_change(row)}." for row in by_kind),
            (
                f"{EPIC} recomputes {ours['recomputed_fraction']:.0%} of the cached tokens and"
                f" takes {ours['ttft_ms']:.0f} ms with passages,"
                f" {fixed[EPIC]['recomputed_fraction']:.0%} and {fixed[EPIC]['ttft_ms']:.0f} ms"
                " with windows."
            ),
            (
                f"{EPIC} on passages scores {ours['score']:.2f}; {CACHEBLEND} on windows"
                f" {theirs['score']:.2f} in {theirs['ttft_ms']:.0f} ms. The Pareto front of both"
                f" cuts, fastest first: {best}."
            ),
        ]
    )


def _describe_change(row: Row) -> str:
    """Say by how much the score changed, and whether that is more than chance (by the 95%
    interval)."""
    low, high = row["vs_semantic_low"], row["vs_semantic_high"]
    unclear = "; no clear effect" if low <= 0 <= high else ""
    return f"{points(row['vs_semantic'])} ({100 * low:+.0f} to {100 * high:+.0f}{unclear})"


FIGURE = Figure(
    name="epic-9",
    title="Chunks cut by meaning and by length",
    source="EPIC, figure 9",
    claim=(
        "how contexts are cut matters: chunks of 512 tokens instead of whole documents raise"
        " accuracy on SAMSum and lower it on HotpotQA, and AttnLink's time to first token follows"
        " the number of chunks. AttnLink with semantic chunks stays on the Pareto front beside"
        " CacheBlend with chunks of 512 tokens."
    ),
    columns=(
        "split",
        "policy",
        "n",
        "chunks",
        "score",
        "vs_semantic",
        "vs_semantic_low",
        "vs_semantic_high",
        "recomputed_fraction",
        "timed",
        "ttft_ms",
        "pareto",
    ),
    measure=_measure,
    draw=_draw,
    finding=_finding,
    table=overall,
    size=(10.0, 9.0),
)
register(FIGURE)
