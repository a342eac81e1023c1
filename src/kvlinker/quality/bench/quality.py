"""Measures the answer quality of policies against a full prefill: rows of scores over data sets of
examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlinker.base.errors import InvalidRequestError
from kvlinker.quality.bench.harness.benchmark import (
    ChunkTokens,
    ComparedPolicies,
    Setup,
    WeightFormats,
    benchmark,
    compared_policies,
    names,
    supported_policies,
)
from kvlinker.quality.bench.harness.report import Report, Row, empty_figure, save_figure
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.evaluation.contexts import ContextSplit, ContextSplitter
from kvlinker.quality.evaluation.datasets import load_dataset
from kvlinker.quality.evaluation.evaluate import Journal, evaluate
from kvlinker.quality.evaluation.examples import REFERENCE, Dataset, Example, Result, Skipped
from kvlinker.quality.evaluation.metrics import METRICS, rouge_scorer
from kvlinker.quality.evaluation.task_scores import task_scores
from kvlinker.quality.progress import Progress, silent
from kvlinker.settings import Settings

if TYPE_CHECKING:
    from kvlinker.quality.evaluation.examiner import Examiner

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
    "answer_kl",
    "mixed",
)

CONTEXT_SETTINGS = ("generation_context", "system_prompt", "chat_template", "max_model_len")
"""The fields of ``Settings`` that say how chunks and prompts are made."""

CHANGE_RESULTS = ("max_tokens", "truncate", "codec", *CONTEXT_SETTINGS)
"""The settings that kept results depend on, besides the example and the policy."""

_SKIPS_SHOWN = 5
"""The skipped records of which each is named."""


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """The questions and the options of the benchmark."""

    datasets: tuple[str, ...] = ("reader",)
    """Names and paths, as ``load_dataset`` takes them."""
    policies: tuple[str, ...] = (
        REFERENCE,
        "naive",
        "query-5",
        "query-5-sensitive",
        "legolink-16",
        "random-15",
    )
    tasks: tuple[str, ...] = ()
    """The tasks to ask; none for all."""
    limit: int | None = None
    """Most examples of each data set."""
    split: ContextSplit = ContextSplit.SEMANTIC
    chunk_tokens: int = 512
    """Most tokens of a chunk that is cut."""
    max_tokens: int | None = None
    """The longest answer in tokens, in place of the questions' own limits."""
    truncate: bool = False
    """True to take passages out of contexts over the window; else these examples are skipped."""
    concurrency: int = 1
    """Examples at once; above 1 is faster, but rounding then differs from run to run."""
    codec: str = "raw"
    """The name of the codec that chunks go through before they are used."""
    resume: Path | None = None
    """The file that keeps finished results."""


Examined = tuple[Example, tuple[Result, ...]]
"""Pairs an example with the results of all policies that were asked for, and of ``full``."""


@dataclass(frozen=True, slots=True)
class Quality:
    """The measurements of answers."""

    report: Report
    answered: tuple[Examined, ...]
    skipped: tuple[Skipped, ...]
    """The examples that could not be asked."""


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """Pick the rows of the metric that each task is usually measured by."""
    return [row for row in rows if row["main"]]


def plot_quality(rows: Sequence[Row], path: Path) -> None:
    """Draw score over recomputed share, a panel per data set and task and a point per policy, with
    their intervals.

    ``rows`` have one metric per task. Raises InvalidRequestError as ``plot_ttft`` does.
    """
    tasks = list(dict.fromkeys((row["dataset"], row["task"], row["metric"]) for row in rows))
    across = min(len(tasks), 3)
    down = -(-len(tasks) // across)
    figure = empty_figure(4.5 * across, 3.6 * down)
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (dataset, task, metric) in zip(panels, tasks, strict=False):
        for row in rows:
            if (row["dataset"], row["task"]) == (dataset, task):
                reach = [[row["score"] - row["ci_low"]], [row["ci_high"] - row["score"]]]
                axes.errorbar(
                    100 * row["recomputed_fraction"],
                    row["score"],
                    reach,
                    marker="o",
                    label=row["policy"],
                )
        title = dataset if task == dataset else f"{dataset}: {task}"
        axes.set(xlabel="recomputed (% of cached tokens)", ylabel=metric, title=title)
        if metric in METRICS:  # others are no shares
            axes.set_ylim(0, 1.02)
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6)
    save_figure(figure, path)


@benchmark("quality", plot=plot_quality, shown=main_rows, settings=CONTEXT_SETTINGS)
def quality(
    setup: Setup,
    *,
    policies: ComparedPolicies = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "reader (the default), prose, a file of examples, or a folder to hide needles in;"
                " may be repeated."
            ),
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Only these tasks, with commas between.", show_default=False)
    ] = "",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most examples of each data set.")
    ] = None,
    split: Annotated[
        ContextSplit, typer.Option(help="Chunks are passages, or windows of equal length.")
    ] = ContextSplit.SEMANTIC,
    chunk_tokens: ChunkTokens = 512,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest answer; by default what the data set asks for."),
    ] = None,
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate", help="Take passages from the middle of contexts over the window."
        ),
    ] = False,
    concurrency: Annotated[
        int,
        typer.Option(
            min=1, max=64, help="Examples at once; with more than 1, rounding differs between runs."
        ),
    ] = 1,
    codec: Annotated[
        str, typer.Option(help="Use chunks as a tier with this codec gives them back.")
    ] = "raw",
    formats: WeightFormats = "",
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Keep finished results in this file, and continue from it.", dir_okay=False
        ),
    ] = None,
) -> Report:
    """Measure the quality of answers, and of predictions of given text, by policy, and of a full
    prefill.

    With --formats, each policy is also asked with weights in these formats, as POLICY@FORMAT.
    """
    options = QualityOptions(
        datasets=tuple(dataset or ("reader",)),
        tasks=names(tasks),
        policies=tuple(compared_policies(policies, setup.settings)),
        limit=limit,
        split=split,
        chunk_tokens=chunk_tokens,
        max_tokens=max_tokens,
        truncate=truncate,
        concurrency=concurrency,
        codec=codec,
        resume=resume,
    )
    if resume is not None and not resume.absolute().parent.is_dir():
        raise InvalidRequestError(
            f"Cannot write {resume}: there is no folder {resume.parent}.", param="resume"
        )
    others = setup.subjects(names(formats)) if formats else {}
    subject = setup.subject()
    if policies is None:
        options = replace(
            options, policies=tuple(supported_policies(options.policies, subject.loaded))
        )
    measured = run_quality(subject, setup.settings, options, others, progress=setup.progress)
    warnings = [f"skipped {skip.where}: {skip.reason}" for skip in measured.skipped[:_SKIPS_SHOWN]]
    if len(measured.skipped) > _SKIPS_SHOWN:
        warnings.append(f"skipped {len(measured.skipped)} examples in all")
    return replace(measured.report, warnings=warnings)


def run_quality(
    subject: MeasuredModel,
    settings: Settings,
    options: QualityOptions,
    others: Mapping[str, MeasuredModel] = MappingProxyType({}),
    *,
    progress: Progress = silent,
) -> Quality:
    """Ask all examples under all policies, and again of the ``others``, which hold the model with
    its weights in other formats. All are compared with the full prefill of ``subject``.

    ``settings`` say how chunks are made (``generation_context``, ``system_prompt``,
    ``chat_template``). Raises InvalidRequestError for data that cannot be read, an unknown codec,
    one that changes chunks while several examples run at once, and when no example could be
    asked; PolicyError for a policy that the model cannot be linked under.
    """
    from kvlinker.quality.evaluation.examiner import FORMAT_MARK, Examiner
    from kvlinker.store.format.codecs import RAW, find_codec

    codec = find_codec(options.codec)
    if codec.name != RAW.name and options.concurrency > 1:
        raise InvalidRequestError(
            f"The codec {codec.name} exchanges chunks in the store, which examples that run at once"
            " would share. Leave out --concurrency, or --codec.",
            param="concurrency",
        )
    rouge_scorer()  # where it is missing, better now than after the run
    asked = [f"{policy}{FORMAT_MARK}{form}" for form in others for policy in options.policies]
    options = replace(options, policies=(*options.policies, *asked))
    contexts = {name: getattr(settings, name) for name in CONTEXT_SETTINGS}
    with ExitStack() as running:
        # chunks are used at once, so that none need a disk
        llm = running.enter_context(subject.llm(disk_space=0, **contexts))
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
            one_by_one=options.concurrency == 1,
            codec=codec,
        )
        same = {
            form: replace(examiner, llm=running.enter_context(other.llm(disk_space=0, **contexts)))
            for form, other in others.items()
        }
        examiner = replace(examiner, others=same)
        answered, skipped = _answers(examiner, datasets, settings, options, progress)
    if not answered:
        raise InvalidRequestError(
            f"No example could be asked. {_reasons(skipped)}", param="dataset"
        )
    rows: list[Row] = [score.row() for score in task_scores(answered, options.policies)]
    report = subject.report(rows)
    described = {
        name: value
        for name, value in _describe(settings, options).items()
        if value not in (None, [])
    }
    described |= {
        "formats": {dataset.name: dataset.format for dataset in datasets},
        "skipped": len(skipped),
    }
    report = replace(report, settings={**report.settings, **described}, columns=COLUMNS)
    return Quality(report, answered, skipped)


def _require_names(datasets: Sequence[Dataset]) -> None:
    """Raise InvalidRequestError if two data sets share a name, which rows go by."""
    used = [dataset.name for dataset in datasets]
    twice = [name for name in used if used.count(name) > 1]
    if twice:
        raise InvalidRequestError(
            f"Two data sets are called {twice[0]!r}: rename one of the files.", param="dataset"
        )


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
        described = _describe(settings, options)
        journal = Journal(
            options.resume, made_by | {name: described[name] for name in CHANGE_RESULTS}
        )
    asked = evaluate(examiner, examples, policies, concurrency=options.concurrency, journal=journal)
    for done, (example, results) in enumerate(asked, 1):
        progress("examples", done, len(examples))
        if isinstance(results, Skipped):
            skipped.append(results)
        else:
            answered.append((example, results))
    return tuple(answered), tuple(skipped)


def _describe(settings: Settings, options: QualityOptions) -> dict[str, Any]:
    """Return everything that the scores depend on, and how they were made."""
    described = asdict(options) | {name: getattr(settings, name) for name in CONTEXT_SETTINGS}
    del described["resume"]
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in described.items()
    }


def _reasons(skipped: Sequence[Skipped]) -> str:
    """Say how many examples were skipped, and why the first were."""
    shown = "; ".join(f"{skip.where}: {skip.reason}" for skip in skipped[:3])
    return f"{len(skipped)} skipped: {shown}{'; …' if len(skipped) > 3 else ''}"
