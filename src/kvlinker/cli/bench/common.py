"""What the benchmark commands share: how one is registered, options, and how results are shown."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvlinker.cli.options import settings_options
from kvlinker.config import Settings

if TYPE_CHECKING:
    from kvlinker.research.bench.report import Report

app = typer.Typer(help="Benchmarks: every competitor in one run, medians and ratios.", no_args_is_help=True)

Shape = Annotated[str | None, typer.Option(help="Random weights of this shape (tiny, 285m, 8b) in place of --model.")]
Json = Annotated[Path | None, typer.Option(help="Write the results to this file.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the results to this file (.png, .svg, .pdf).")]
Repeat = Annotated[int, typer.Option(min=1, help="Measurements of each case, after one warm-up.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens per chunk.")]
FreshTokens = Annotated[int, typer.Option(min=1, help="Tokens behind the chunks.")]
Split = Annotated[Literal["semantic", "fixed"], typer.Option(help="Chunks are passages, or windows of equal length.")]
Policies = Annotated[str, typer.Option(help="Policies to compare, with commas between.")]
UsualPolicies = Annotated[
    str | None,
    typer.Option(
        help="Policies to compare, with commas between; by default full, naive, the policy in force, legolink-16, "
        "attnlink-16 and random-15.",
        show_default=False,
    ),
]

MODEL_OPTIONS = ("model", "engine", "vllm_options", "dtype", "device", "threads")
QUALITY_OPTIONS = ("generation_context", "system_prompt", "chat_template", "max_model_len")

WIDTH_OF_FILES = 180


def register(*settings: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that makes a function a benchmark, ``kvlinker bench NAME``, with options for these settings.

    Every module of this package is loaded, so a benchmark takes one file; it imports what needs torch when it runs.
    """

    def decorate(benchmark: Callable[..., None]) -> Callable[..., None]:
        app.command()(settings_options(*settings)(benchmark))
        return benchmark

    return decorate


def show(report: Report, columns: Sequence[str], json: Path | None) -> None:
    """Print these columns of a report as a table, and write all of it to the file ``json``, if there is one."""
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
    """The command that runs, as a shell takes it."""
    return shlex.join(["kvlinker", *sys.argv[1:]])


def policy_names(text: str) -> list[str]:
    """The policies that ``text`` names, with commas between. Raises PolicyError."""
    from kvlinker.linking import parse_policy

    return [parse_policy(name.strip()).name for name in text.split(",")]


def usual_policies(text: str | None, settings: Settings) -> list[str]:
    """The policies that ``UsualPolicies`` names, each once; the one in force is what the engine runs by default."""
    names = policy_names(text or f"full,naive,{settings.policy},legolink-16,attnlink-16,random-15")
    return list(dict.fromkeys(names))


def counts(text: str) -> list[int]:
    """The numbers that ``text`` has, with commas between. Raises InvalidRequestError for numbers below 1."""
    from kvlinker.errors import InvalidRequestError

    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidRequestError(f"{text!r} is not a list of whole numbers with commas between.") from error
    if min(counts) < 1:
        raise InvalidRequestError(f"{text!r}: every number must be at least 1.")
    return counts
