"""``kvlinker bench``: measure, print a table, write JSON, draw a plot."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlinker.cli.failures import BAD_USAGE, failures, warn
from kvlinker.cli.options import settings_options
from kvlinker.config import Settings
from kvlinker.evaluation.contexts import ContextSplit

if TYPE_CHECKING:
    from kvlinker.bench.report import Report

app = typer.Typer(help="Benchmarks: every competitor in one run, medians and ratios.", no_args_is_help=True)

Shape = Annotated[str | None, typer.Option(help="Random weights of this shape (tiny, 285m, 8b) in place of --model.")]
Json = Annotated[Path | None, typer.Option(help="Write the results to this file.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the results to this file (.png, .svg, .pdf).")]
Repeat = Annotated[int, typer.Option(min=1, help="Measurements of each case, after one warm-up.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens per chunk.")]
FreshTokens = Annotated[int, typer.Option(min=1, help="Tokens behind the chunks.")]
Policies = Annotated[str, typer.Option(help="Policies to compare, with commas between.")]

WIDTH_OF_FILES = 180
SKIPS_SHOWN = 5

MODEL_OPTIONS = ("model", "engine", "dtype", "device", "threads")


@app.command()
@settings_options(*MODEL_OPTIONS)
def ttft(
    settings: Settings,
    shape: Shape = None,
    chunks: Annotated[str, typer.Option(help="Chunks per prompt; several numbers with commas sweep the length.")] = "8",
    chunk_tokens: ChunkTokens = 512,
    fresh_tokens: FreshTokens = 32,
    policies: Policies = "full,naive,legolink-16,attnlink-16,random-15",
    tier: Annotated[str, typer.Option(help="Where the chunk caches lie: host or disk.")] = "host",
    full_limit: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt that full prefill takes part in, in tokens.")
    ] = None,
    repeat: Repeat = 5,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Time to first token of prompts made of cached chunks, by policy, and where it goes."""
    from kvlinker.bench.plots import plot_ttft
    from kvlinker.bench.subject import make_subject
    from kvlinker.bench.ttft import COLUMNS, Workload, run_ttft, scaling_exponents

    with failures(BAD_USAGE), progress_line() as progress:
        workloads = [Workload(count, chunk_tokens, fresh_tokens) for count in _counts(chunks)]
        names = _policy_names(policies)
        subject = make_subject(settings, shape=shape, command=command_line(), repeat=repeat)
        report = run_ttft(subject, workloads, names, repeat=repeat, tier=tier, full_limit=full_limit, progress=progress)
    show(report, COLUMNS, json)
    for (policy, engine), exponent in scaling_exponents(report.rows).items():
        typer.echo(f"{policy} ({engine}): TTFT ~ tokens^{exponent:.2f}")
    if plot is not None:
        with failures(BAD_USAGE):
            plot_ttft(report.rows, plot)


@app.command()
@settings_options(*MODEL_OPTIONS)
def decode(
    settings: Settings,
    shape: Shape = None,
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas between.")] = "1,4",
    context_tokens: Annotated[int, typer.Option(min=1, help="Prompt length of each request.")] = 512,
    steps: Annotated[int, typer.Option(min=4, help="Tokens to decode.")] = 24,
    repeat: Repeat = 5,
    json: Json = None,
) -> None:
    """Time per decoded token, beside transformers' own cached decoding."""
    from kvlinker.bench.decode import COLUMNS, run_decode
    from kvlinker.bench.subject import make_subject

    with failures(BAD_USAGE), progress_line() as progress:
        sizes = _counts(batches)
        subject = make_subject(settings, shape=shape, command=command_line(), repeat=repeat, steps=steps)
        report = run_decode(
            subject, sizes, context_tokens=context_tokens, steps=steps, repeat=repeat, progress=progress
        )
    show(report, COLUMNS, json)


@app.command()
@settings_options(*MODEL_OPTIONS)
def memory(
    settings: Settings,
    shape: Shape = None,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of the prompt.")] = 8,
    chunk_tokens: ChunkTokens = 512,
    fresh_tokens: FreshTokens = 32,
    policies: Policies = "naive,legolink-16,full",
    json: Json = None,
) -> None:
    """Peak memory of one request, beside the KV that it needs in any case."""
    from kvlinker.bench.memory import COLUMNS, run_memory
    from kvlinker.bench.subject import make_subject
    from kvlinker.bench.ttft import Workload

    with failures(BAD_USAGE), progress_line() as progress:
        names = _policy_names(policies)
        subject = make_subject(settings, shape=shape, command=command_line())
        report = run_memory(subject, Workload(chunks, chunk_tokens, fresh_tokens), names, progress=progress)
    show(report, COLUMNS, json)


@app.command()
@settings_options(*MODEL_OPTIONS)
def creation(
    settings: Settings,
    shape: Shape = None,
    chunk_tokens: ChunkTokens = 512,
    repeat: Repeat = 9,
    json: Json = None,
) -> None:
    """Time to compute a chunk, with and without the attention scores that some policies use."""
    from kvlinker.bench.creation import COLUMNS, run_creation
    from kvlinker.bench.subject import make_subject

    with failures(BAD_USAGE), progress_line() as progress:
        subject = make_subject(settings, shape=shape, command=command_line(), repeat=repeat)
        report = run_creation(subject, chunk_tokens=chunk_tokens, repeat=repeat, progress=progress)
    show(report, COLUMNS, json)


@app.command()
@settings_options(*MODEL_OPTIONS)
def overhead(
    settings: Settings,
    shape: Shape = None,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of the prompt.")] = 8,
    chunk_tokens: ChunkTokens = 512,
    policy: Annotated[str, typer.Option(help="Linking policy.")] = "legolink-16",
    repeat: Repeat = 15,
    json: Json = None,
) -> None:
    """What HTTP adds to a request, beside the same request in Python."""
    from kvlinker.bench.overhead import COLUMNS, run_overhead
    from kvlinker.bench.subject import make_subject
    from kvlinker.bench.ttft import Workload

    with failures(BAD_USAGE), progress_line() as progress:
        (name,) = _policy_names(policy)
        subject = make_subject(settings, shape=shape, command=command_line(), repeat=repeat)
        report = run_overhead(subject, Workload(chunks, chunk_tokens, 32), name, repeat=repeat, progress=progress)
    show(report, COLUMNS, json)


@app.command()
@settings_options(*MODEL_OPTIONS)
def isolation(
    settings: Settings,
    shape: Shape = None,
    lookups: Annotated[int, typer.Option(min=10, help="Lookups of each kind.")] = 1000,
    json: Json = None,
) -> None:
    """Whether a tenant can tell by time what other tenants have: lookups of theirs beside lookups of nothing."""
    from kvlinker.bench.isolation import COLUMNS, run_isolation
    from kvlinker.bench.subject import make_subject

    with failures(BAD_USAGE), progress_line() as progress:
        subject = make_subject(settings, shape=shape, command=command_line(), lookups=lookups)
        report = run_isolation(subject, lookups=lookups, progress=progress)
    show(report, COLUMNS, json)


QUALITY_OPTIONS = ("generation_context", "system_prompt", "chat_template", "max_model_len")


@app.command()
@settings_options(*MODEL_OPTIONS, *QUALITY_OPTIONS)
def quality(
    settings: Settings,
    shape: Shape = None,
    policies: Policies = "full,naive,legolink-16,attnlink-16,random-15",
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="reader (the default), prose, a file of examples, or a folder to hide needles in; may be repeated.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[str, typer.Option(help="Only these tasks, with commas between.", show_default=False)] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Most examples of each data set.")] = None,
    split: Annotated[ContextSplit, typer.Option(help="Chunks are passages, or windows of equal length.")] = (
        ContextSplit.SEMANTIC
    ),
    chunk_tokens: ChunkTokens = 512,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; by default what the data set asks for.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Take passages from the middle of contexts over the window.")
    ] = False,
    deviation: Annotated[
        bool, typer.Option("--deviation", help="Measure KV and attention deviation by layer, too.")
    ] = False,
    concurrency: Annotated[
        int, typer.Option(min=1, max=64, help="Examples at once; with more than 1, rounding differs between runs.")
    ] = 1,
    resume: Annotated[
        Path | None, typer.Option(help="Keep finished results in this file, and go on from it.", dir_okay=False)
    ] = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Quality of answers, and of predictions of given text, by policy, beside those of a full prefill."""
    from kvlinker.bench.plots import plot_quality
    from kvlinker.bench.quality import COLUMNS, QualityOptions, main_rows, run_quality
    from kvlinker.bench.subject import make_subject

    with failures(BAD_USAGE):
        require_folders(json, plot, resume)
        options = QualityOptions(
            datasets=tuple(dataset or ("reader",)),
            tasks=tuple(task.strip() for task in tasks.split(",") if task.strip()),
            policies=tuple(dict.fromkeys(_policy_names(policies))),
            limit=limit,
            split=split,
            chunk_tokens=chunk_tokens,
            max_tokens=max_tokens,
            truncate=truncate,
            deviation=deviation,
            concurrency=concurrency,
            resume=resume,
        )
        with progress_line():
            subject = make_subject(settings, shape=shape, command=command_line())
        with progress_bar() as advance:
            measured = run_quality(subject, settings, options, progress=advance)
    for skip in measured.skipped[:SKIPS_SHOWN]:
        warn(f"skipped {skip.where}: {skip.reason}")
    if len(measured.skipped) > SKIPS_SHOWN:
        warn(f"skipped {len(measured.skipped)} examples in all")
    report = measured.report
    show(replace(report, rows=main_rows(report.rows)), COLUMNS, None)
    if json is not None:
        report.write_json(json)
    if plot is not None:
        with failures(BAD_USAGE):
            plot_quality(main_rows(report.rows), plot)


@app.command()
@settings_options(*MODEL_OPTIONS, *QUALITY_OPTIONS)
def figure(
    settings: Settings,
    name: Annotated[str, typer.Argument(help="Name of the figure, or all; list shows their names.")],
    page: Annotated[Path, typer.Option(help="Write the figure into this page.", dir_okay=False)] = Path(
        "reproduction.md"
    ),
    limit: Annotated[int | None, typer.Option(min=1, help="Examples of each measurement.")] = None,
    shape: Annotated[str | None, typer.Option(help="Random weights to time (tiny, 285m, 8b).")] = None,
    redraw: Annotated[bool, typer.Option("--redraw", help="Measure nothing: show stored results again.")] = False,
) -> None:
    """A figure of the papers, measured anew: a plot, a table, and the paper's claim beside them."""
    from kvlinker.figures.lab import Lab
    from kvlinker.figures.page import show_figure, write_figure
    from kvlinker.figures.registry import FIGURES, find_figure

    if name == "list":
        for one in FIGURES.values():
            typer.echo(f"{one.name:24} {one.source}: {one.title}")
        return
    with failures(BAD_USAGE):
        require_folders(page)
        for one in FIGURES.values() if name == "all" else [find_figure(name)]:
            if redraw:
                show_figure(page, one, list(FIGURES))
                continue
            command = shlex.join(["kvlinker", *(one.name if word == "all" else word for word in sys.argv[1:])])
            with _described_progress() as advance:
                rows = one.measure(lab := Lab(settings, command, limit, shape, advance))
            write_figure(page, one, lab.report(rows, one.shape), list(FIGURES))
            typer.echo(f"{one.name}: {one.finding(rows)}")


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar of examples on stderr."""
    with _described_progress() as advance:
        yield lambda done, total: advance("examples", done, total)


@contextmanager
def _described_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr that says what it counts."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("preparing the model", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being measured."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("preparing the model") as status:
        yield status.update


def show(report: Report, columns: Sequence[str], json: Path | None) -> None:
    from rich.console import Console

    console = Console()
    report.print(console if console.is_terminal else Console(width=WIDTH_OF_FILES), columns)
    if json is not None:
        report.write_json(json)


def require_folders(*files: Path | None) -> None:
    """Raises InvalidRequestError when one of the files to write lies in no folder, rather than after a long run."""
    from kvlinker.errors import InvalidRequestError

    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise InvalidRequestError(f"Cannot write {file}: there is no folder {file.parent}.")


def command_line() -> str:
    return shlex.join(["kvlinker", *sys.argv[1:]])


def _policy_names(text: str) -> list[str]:
    from kvlinker.linking import parse_policy

    return [parse_policy(name.strip()).name for name in text.split(",")]


def _counts(text: str) -> list[int]:
    from kvlinker.errors import InvalidRequestError

    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidRequestError(f"{text!r} is not a list of whole numbers with commas between.") from error
    if min(counts) < 1:
        raise InvalidRequestError(f"{text!r}: every number must be at least 1.")
    return counts
