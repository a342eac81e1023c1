"""Answers from chunk caches of earlier prompts, policy by policy."""

from __future__ import annotations

from collections.abc import Sequence

from kvlinker.linking import Policy
from kvlinker.research.bench.quality import score_row
from kvlinker.research.bench.report import Row
from kvlinker.research.evaluation.answers import REFERENCE, Examiner
from kvlinker.research.evaluation.examples import Skipped
from kvlinker.research.evaluation.runner import evaluate
from kvlinker.research.evaluation.scores import ALL_TASKS, scores
from kvlinker.research.figures.cachecraft.earlier import EarlierPrompts
from kvlinker.research.figures.lab import Lab

TASK = "the task's own"
VERSUS_FULL = ("rouge_l_vs_full", "jaccard_vs_full")


def quality_of_earlier_chunks(lab: Lab, what: str, policies: Sequence[str | Policy], *, limit: int) -> list[Row]:
    """A row per policy, task and metric: ``VERSUS_FULL``, and as ``TASK`` the metric that the task is measured by.

    Every chunk's KV comes from an earlier prompt, see ``EarlierPrompts``. ``what`` is said while it runs.
    """
    names = [REFERENCE, *(str(policy) for policy in policies)]
    with lab.bench(limit=limit) as bench:
        examiner = Examiner(
            bench.llm,
            prepare=EarlierPrompts(bench.llm, bench.examples),
            unregistered={str(policy): policy for policy in policies if isinstance(policy, Policy)},
        )
        answered = []
        for done, (example, outcome) in enumerate(evaluate(examiner, bench.examples, names)):
            lab.progress(what, done + 1, len(bench.examples))
            if not isinstance(outcome, Skipped):
                answered.append((example, outcome))
    return [
        {**score_row(score), "metric": TASK if score.main else score.metric}
        for score in scores(answered, names)
        if score.main or score.metric in VERSUS_FULL
    ]


def overall(rows: Sequence[Row], metric: str) -> dict[str, Row]:
    """The rows over all tasks, by policy."""
    tasks = {row["task"] for row in rows}
    task = ALL_TASKS if ALL_TASKS in tasks else next(iter(tasks))
    return {row["policy"]: row for row in rows if (row["task"], row["metric"]) == (task, metric)}
