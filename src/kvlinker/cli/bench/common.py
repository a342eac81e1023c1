"""What the benchmark commands share: options, progress, and how results are shown."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvlinker.research.bench.report import Report

Shape = Annotated[str | None, typer.Option(help="Random weights of this shape (tiny, 285m, 8b) in place of --model.")]
Json = Annotated[Path | None, typer.Option(help="Write the results to this file.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the results to this file (.png, .svg, .pdf).")]
Repeat = Annotated[int, typer.Option(min=1, help="Measurements of each case, after one warm-up.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens per chunk.")]
FreshTokens = Annotated[int, typer.Option(min=1, help="Tokens behind the chunks.")]
Policies = Annotated[str, typer.Option(help="Policies to compare, with commas between.")]

MODEL_OPTIONS = ("model", "engine", "vllm_options", "dtype", "device", "threads")
QUALITY_OPTIONS = ("generation_context", "system_prompt", "chat_template", "max_model_len")

WIDTH_OF_FILES = 180


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar of examples on stderr."""
    with described_progress() as advance:
        yield lambda done, total: advance("examples", done, total)


@contextmanager
def described_progress() -> Iterator[Callable[[str, int, int], None]]:
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


def policy_names(text: str) -> list[str]:
    from kvlinker.linking import parse_policy

    return [parse_policy(name.strip()).name for name in text.split(",")]


def counts(text: str) -> list[int]:
    from kvlinker.errors import InvalidRequestError

    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidRequestError(f"{text!r} is not a list of whole numbers with commas between.") from error
    if min(counts) < 1:
        raise InvalidRequestError(f"{text!r}: every number must be at least 1.")
    return counts
