"""Measures the answers to questions that need what other agents said, by how their prompts have
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from kvlinker.base.errors import InvalidRequestError
from kvlinker.quality.bench.harness.benchmark import Setup, benchmark, names
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.bench.quality import CONTEXT_SETTINGS
from kvlinker.quality.evaluation.contexts import ContextSplitter
from kvlinker.quality.evaluation.datasets import load_dataset
from kvlinker.quality.evaluation.examples import REFERENCE, Example, Question, Result
from kvlinker.quality.evaluation.task_scores import ALL_TASKS, task_scores
from kvlinker.quality.progress import Progress, silent
from kvlinker_lab.agents.handovers import WAYS, Handovers

COLUMNS = (
    "task",
    "policy",
    "n",
    "score",
    "ci_low",
    "ci_high",
    "same_answer",
    "agreement",
    "kl",
    "recomputed_fraction",
)
SAME_ANSWER = "exact_match_vs_full"


def all_tasks(rows: Sequence[Row]) -> Sequence[Row]:
    """Pick the rows of all tasks together, where there are several."""
    return [row for row in rows if row["task"] == ALL_TASKS] or rows


@benchmark("handovers", shown=all_tasks, settings=CONTEXT_SETTINGS)
def handovers(
    setup: Setup,
    *,
    dataset: Annotated[str, typer.Option(help="Questions, as bench quality takes them.")] = (
        "reader"
    ),
    tasks: Annotated[
        str, typer.Option(help="Only these tasks, with commas between.", show_default=False)
    ] = "",
    limit: Annotated[int, typer.Option(min=2, help="Most questions.")] = 105,
    ways: Annotated[
        str, typer.Option(help="Only these ways, with commas between.", show_default=False)
    ] = "",
) -> Report:
    """Measure answers to questions that need what other agents said, beside those of a full
    prefill: as text, with the KV that was kept, computed alone, and where the tokens that deviate
    most are computed again.

    One passage in three is said by another agent, whose prompt is computed in full.
    ``same_answer`` is the share of answers that are full's, ``agreement`` that of first tokens.
    """
    subject = setup.subject(dataset=dataset, limit=limit)
    contexts = {name: getattr(setup.settings, name) for name in CONTEXT_SETTINGS}
    return run_handovers(
        subject,
        dataset,
        names(tasks),
        limit=limit,
        ways=names(ways) or tuple(WAYS),
        settings=contexts,
        progress=setup.progress,
    )


def run_handovers(
    subject: MeasuredModel,
    dataset: str,
    tasks: Sequence[str] = (),
    *,
    limit: int,
    ways: Sequence[str] = tuple(WAYS),
    settings: dict[str, Any],
    progress: Progress = silent,
) -> Report:
    """Ask the first questions of a data set in all ways; what other agents said elsewhere, they
    said behind the passages of the question before. Raises InvalidRequestError for unknown ways."""
    if unknown := [way for way in ways if way not in WAYS]:
        raise InvalidRequestError(
            f"Unknown way {unknown[0]!r}; known are {', '.join(WAYS)}.", param="ways"
        )
    from kvlinker_lab.inspection import EngineInspector

    answered: list[tuple[Example, Sequence[Result]]] = []
    with subject.llm(disk_space=0, chunk_scores=False, implicit="off", **settings) as llm:
        splitter = ContextSplitter(llm.builder.encoder)
        loaded = load_dataset(dataset, splitter, limit=limit, tasks=tasks).examples
        questions = [example for example in loaded if isinstance(example, Question)]
        asking = Handovers(llm, EngineInspector(llm, subject.loaded), ways)
        for number, question in enumerate(questions):
            progress("questions", number + 1, len(questions))
            if answers := asking.ask(question, questions[number - 1]):
                answered.append((question, tuple(answers.values())))
    if not answered:
        raise InvalidRequestError(
            f"No answer was sampled in the tokens of its text, of {len(questions)} questions.",
            param="dataset",
        )
    policies = [REFERENCE, *(f"{way} {name}" for way in ways for name in WAYS[way])]
    report = subject.report(_rows(answered, policies))
    kept = {"asked": len(answered), "of": len(questions)}
    return replace(report, settings={**report.settings, **kept}, columns=COLUMNS)


def _rows(
    answered: Sequence[tuple[Example, Sequence[Result]]], policies: Sequence[str]
) -> list[Row]:
    """Return the scores of all tasks together, and of each."""
    scores = task_scores(answered, policies)
    same = {
        (score.task, score.policy): score.score for score in scores if score.metric == SAME_ANSWER
    }
    rows = [
        {**score.row(), "same_answer": same[score.task, score.policy]}
        for score in scores
        if score.main
    ]
    return sorted(rows, key=lambda row: row["task"] != ALL_TASKS)
