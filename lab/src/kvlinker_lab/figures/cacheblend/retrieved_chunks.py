"""Measures CacheBlend's figure 2: quality against the number of retrieved chunks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.evaluation.evaluate import evaluate
from kvlinker.quality.evaluation.examiner import Examiner
from kvlinker.quality.evaluation.examples import Question
from kvlinker.quality.evaluation.task_scores import task_scores
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.lab import SEVERAL_PASSAGES, Lab

COUNTS = (1, 2, 4, 8, 12, 16)
"""Numbers of passages that are kept."""
POLICIES = ("full", "cacheblend-15", "query-5", "naive")
EXAMPLES = 84
"""The number of examples, unless ``--limit`` gives another: a multiple of the seven kinds of
questions, which come in turn."""

DODGE = 0.08
"""The horizontal distance between the policies' points in the figure, in passages."""
K1, B = 1.5, 0.75
"""BM25's constants: how fast repeated words saturate, and how much long passages are held
against."""


def retrieve(question: str, passages: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the ``count`` passages that rank highest for the question by Okapi BM25, in their own
    order.

    Words are compared in lower case. Of equal scores, the earlier passage is taken.
    """
    words = [Counter(words_of(passage)) for passage in passages]
    lengths = np.array([counts.total() for counts in words], dtype=np.float64)
    relative = lengths / max(float(lengths.mean()), 1.0) if len(words) else lengths
    scores = np.zeros(len(words))
    for word in set(words_of(question)):
        occurrences = np.array([counts[word] for counts in words], dtype=np.float64)
        holding = int((occurrences > 0).sum())
        rarity = np.log(1 + (len(words) - holding + 0.5) / (holding + 0.5))
        scores += rarity * occurrences * (K1 + 1) / (occurrences + K1 * (1 - B + B * relative))
    best = np.argsort(-scores, kind="stable")[:count]
    return tuple(passages[index] for index in sorted(best))


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


def _measure(lab: Lab) -> list[Row]:
    rows: list[Row] = []
    with lab.open_reader(
        limit=EXAMPLES,
        tasks=SEVERAL_PASSAGES,
        fits=lambda example: len(example.passages) >= max(COUNTS),
    ) as reader:
        for count in COUNTS:
            examples = [_retrieve(example, count) for example in reader.examples]
            answered = []
            for done, (example, results) in enumerate(
                evaluate(Examiner(reader.llm), examples, POLICIES)
            ):
                lab.progress(f"{count} passages", done, len(examples))
                if isinstance(results, tuple):
                    answered.append((example, results))
            evidence = fmean(_holds_answer(example) for example in examples)
            rows += [
                {
                    "passages": count,
                    "policy": score.policy,
                    "n": score.n,
                    "metric": score.metric,
                    "score": score.score,
                    "ci_low": score.ci_low,
                    "ci_high": score.ci_high,
                    "vs_full": score.vs_full,
                    "vs_full_low": score.vs_full_low,
                    "vs_full_high": score.vs_full_high,
                    "recomputed_fraction": score.recomputed_fraction,
                    "evidence": evidence,
                }
                for score in task_scores(answered, POLICIES)
                if score.main
            ]
    return rows


def _retrieve(example: Question, count: int) -> Question:
    """Return the example with the ``count`` passages that fit its question best; all tasks become
    one."""
    return replace(
        example, task="all", passages=retrieve(example.question, example.passages, count)
    )


def _holds_answer(example: Question) -> bool:
    """Return whether every word of an answer is in some passage."""
    words = set(words_of(" ".join(example.passages)))
    return any(words.issuperset(words_of(answer)) for answer in example.answers)


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    for place, policy in enumerate(POLICIES):
        points = [row for row in rows if row["policy"] == policy]
        counts = [row["passages"] + DODGE * place for row in points]
        reach = [
            [row["score"] - row["ci_low"] for row in points],
            [row["ci_high"] - row["score"] for row in points],
        ]
        centre = [row["score"] for row in points]
        axes.errorbar(
            counts, centre, reach, marker="o", markersize=4, elinewidth=0.6, capsize=2, label=policy
        )
    points = [row for row in rows if row["policy"] == POLICIES[0]]
    evidence = [row["evidence"] for row in points]
    axes.plot(
        [row["passages"] for row in points],
        evidence,
        color="grey",
        linestyle=":",
        label="answer's words retrieved",
    )
    axes.set_xticks(COUNTS)
    axes.set(xlabel="retrieved chunks", ylabel="exact match", ylim=(0, 1.02))
    axes.legend(loc="upper left")


def _finding(rows: Sequence[Row]) -> str:
    by_case = {(row["policy"], row["passages"]): row for row in rows}
    fewest, most = (by_case["full", count] for count in (min(COUNTS), max(COUNTS)))
    best = max((by_case["full", count] for count in COUNTS), key=lambda row: float(row["score"]))
    text = (
        f"full scores {fewest['score']:.2f} with {fewest['passages']} chunk and {most['score']:.2f}"
        " with "
    )
    text += str(most["passages"])
    if best["score"] <= fewest["score"]:
        text += ", no gain"
    elif best["score"] > most["score"]:
        text += f", but {best['score']:.2f} with {best['passages']}"
    text += (
        f"; the answer's words are then among the chunks for {100 * most['evidence']:.0f}% of the"
        " questions. "
    )
    differences = [by_case["naive", count]["vs_full"] for count in COUNTS]
    text += "naive differs from it by " + ", ".join(
        f"{difference:+.2f}" for difference in differences
    )
    text += f" with {', '.join(map(str, COUNTS))} chunks. With {max(COUNTS)}: "
    return (
        text
        + "; ".join(_beside_full(by_case[policy, max(COUNTS)]) for policy in POLICIES[1:])
        + "."
    )


def _beside_full(row: Row) -> str:
    if row["vs_full_high"] < 0:
        verdict = "behind full"
    elif row["vs_full_low"] > 0:
        verdict = "ahead of full"
    else:
        verdict = "no significant difference"
    return (
        f"{row['policy']} {row['vs_full']:+.2f} ({row['vs_full_low']:+.2f} to"
        f" {row['vs_full_high']:+.2f}), {verdict}"
    )


FIGURE = Figure(
    name="cacheblend-2",
    title="Quality against the number of retrieved chunks",
    source="CacheBlend, figure 2",
    claim=(
        "answers to questions over several texts get better with more retrieved chunks, up to a"
        " point, and reuse without repair falls further behind a full prefill with every chunk,"
        " since it knows no attention between chunks. Here, BM25 ranks the passages of questions"
        f" with at least {max(COUNTS)} of them ({', '.join(SEVERAL_PASSAGES)}); one that continues"
        " another without naming its subject is seldom found."
    ),
    columns=(
        "passages",
        "policy",
        "n",
        "score",
        "ci_low",
        "ci_high",
        "vs_full",
        "vs_full_low",
        "vs_full_high",
    ),
    measure=_measure,
    draw=_draw,
    finding=_finding,
)
register(FIGURE)
