"""Answer quality of policies beside a full prefill: rows of scores over data sets of examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import exp
from pathlib import Path
from typing import Any

from kvlinker.config import Settings
from kvlinker.errors import InvalidRequestError
from kvlinker.research.bench.report import Report, Row
from kvlinker.research.bench.subject import Subject
from kvlinker.research.evaluation.answers import REFERENCE, Examiner
from kvlinker.research.evaluation.contexts import ContextSplit, ContextSplitter
from kvlinker.research.evaluation.datasets import load_dataset
from kvlinker.research.evaluation.examples import Dataset, Example, Skipped
from kvlinker.research.evaluation.inspection import EngineInspector
from kvlinker.research.evaluation.journal import Journal
from kvlinker.research.evaluation.metrics import rouge_scorer
from kvlinker.research.evaluation.results import Result
from kvlinker.research.evaluation.runner import evaluate
from kvlinker.research.evaluation.scores import Score, scores
from kvlinker.store.format.codecs import RAW, Codec

COLUMNS = (
    "dataset",
    "task",
    "policy",
    "n",
    "metric",
    "score",
    "ci_low",
    "ci_high",
    "vs_full",
    "perplexity",
    "recomputed_fraction",
    "agreement",
    "kl",
)

CHANGE_RESULTS = (
    "max_tokens",
    "truncate",
    "deviation",
    "codec",
    "generation_context",
    "system_prompt",
    "chat_template",
)
"""What results that were kept depend on, besides the example and the policy."""

Progress = Callable[[int, int], None]
"""Takes how many examples are done, and how many there are."""


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """What is asked and how. ``tasks``: only these, if there are any. ``concurrency`` above 1 is faster, but rounding
    then differs from run to run. ``codec``: chunks are what a tier with this codec gives back."""

    datasets: tuple[str, ...] = ("reader",)
    policies: tuple[str, ...] = (REFERENCE, "naive", "legolink-16", "random-15")
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    split: ContextSplit = ContextSplit.SEMANTIC
    chunk_tokens: int = 512
    max_tokens: int | None = None
    truncate: bool = False
    deviation: bool = False
    concurrency: int = 1
    codec: Codec = RAW
    resume: Path | None = None


Examined = tuple[Example, tuple[Result, ...]]
"""An example and the results of all policies that were asked for, and of ``full``."""


@dataclass(frozen=True, slots=True)
class Quality:
    """The report, every example that was asked with its results, and those that could not be asked."""

    report: Report
    answered: tuple[Examined, ...]
    skipped: tuple[Skipped, ...]


def run_quality(
    subject: Subject, settings: Settings, options: QualityOptions, *, progress: Progress = lambda _, __: None
) -> Quality:
    """Ask all examples under all policies.

    ``settings`` say how chunks are made (``generation_context``, ``system_prompt``, ``chat_template``).
    Raises InvalidRequestError for data that cannot be read, and when no example could be asked.
    """
    rouge_scorer()  # where it is missing, better now than after the run
    if options.deviation and options.concurrency > 1:
        raise InvalidRequestError("Deviations need one request at a time: leave --concurrency out.")
    with subject.llm(
        disk_space=0,  # chunks are used at once
        generation_context=settings.generation_context,
        system_prompt=settings.system_prompt,
        chat_template=settings.chat_template,
        max_model_len=settings.max_model_len,
    ) as llm:
        splitter = ContextSplitter(llm.builder.encoder, options.split, options.chunk_tokens)
        datasets = [
            load_dataset(name, splitter, limit=options.limit, tasks=options.tasks)
            for name in dict.fromkeys(options.datasets)
        ]
        _require_names(datasets)
        examiner = Examiner(
            llm,
            max_tokens=options.max_tokens,
            truncate=options.truncate,
            inspector=EngineInspector(llm, subject.loaded) if options.deviation else None,
            one_by_one=options.concurrency == 1,
            codec=options.codec,
        )
        answered, skipped = _answers(examiner, datasets, settings, options, progress)
    if not answered:
        raise InvalidRequestError(f"No example could be asked. {_reasons(skipped)}", param="dataset")
    rows = [score_row(score) for score in scores(answered, options.policies)]
    report = subject.report(rows)
    described = {name: value for name, value in _described(settings, options).items() if value is not None}
    report = replace(report, settings={**report.settings, **described, "skipped": len(skipped)})
    return Quality(report, answered, skipped)


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """Of each task only the metric that it is usually measured by."""
    return [row for row in rows if row["main"]]


def _require_names(datasets: Sequence[Dataset]) -> None:
    """Rows go by name: raises InvalidRequestError where two data sets share one."""
    names = [dataset.name for dataset in datasets]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InvalidRequestError(f"Two data sets are called {twice[0]!r}: rename one of the files.", param="dataset")


def _answers(
    examiner: Examiner,
    datasets: Sequence[Dataset],
    settings: Settings,
    options: QualityOptions,
    progress: Progress,
) -> tuple[tuple[Examined, ...], tuple[Skipped, ...]]:
    answered: list[Examined] = []
    skipped = [skip for dataset in datasets for skip in dataset.skipped]
    examples = [example for dataset in datasets for example in dataset.examples]
    policies = list(dict.fromkeys((*options.policies, REFERENCE)))
    journal = None
    if options.resume is not None:
        made_by = {"kvlinker": version("kvlinker"), "model": examiner.llm.engine.fingerprint}
        described = _described(settings, options)
        journal = Journal(options.resume, made_by | {name: described[name] for name in CHANGE_RESULTS})
    outcomes = evaluate(examiner, examples, policies, concurrency=options.concurrency, journal=journal)
    for done, (example, outcome) in enumerate(outcomes):
        progress(done + 1, len(examples))
        if isinstance(outcome, Skipped):
            skipped.append(outcome)
        else:
            answered.append((example, outcome))
    return tuple(answered), tuple(skipped)


def _described(settings: Settings, options: QualityOptions) -> dict[str, Any]:
    """Whatever the scores depend on, and how they were made."""
    return {
        "datasets": list(options.datasets),
        "tasks": list(options.tasks) or None,
        "policies": list(options.policies),
        "limit": options.limit,
        "split": str(options.split),
        "chunk_tokens": options.chunk_tokens,
        "max_tokens": options.max_tokens,
        "truncate": options.truncate,
        "deviation": options.deviation,
        "concurrency": options.concurrency,
        "codec": options.codec.name,
        "generation_context": str(settings.generation_context),
        "system_prompt": settings.system_prompt,
        "chat_template": settings.chat_template,
    }


def score_row(score: Score) -> Row:
    """A score as a row of the report."""
    row = {
        "policy": score.policy,
        "dataset": score.dataset,
        "task": score.task,
        "n": score.n,
        "metric": score.metric,
        "main": score.main,
        "score": score.score,
        "ci_low": score.interval.low,
        "ci_high": score.interval.high,
        "vs_full": score.difference,
        "vs_full_low": score.difference_interval.low,
        "vs_full_high": score.difference_interval.high,
        "recomputed_fraction": score.recomputed_fraction,
        "agreement": score.agreement,
        "kl": score.kl,
    }
    if score.metric == "loss":
        row["perplexity"] = exp(score.score)
    return row | {"layers": list(score.layers)} if score.layers else row


def _reasons(skipped: Sequence[Skipped]) -> str:
    shown = "; ".join(f"{skip.where}: {skip.reason}" for skip in skipped[:3])
    return f"{len(skipped)} skipped: {shown}{'; …' if len(skipped) > 3 else ''}"
