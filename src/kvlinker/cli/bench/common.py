"""Parts that the commands of benchmarks share: options, signals, and the output of results."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlinker.cli.console import warn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlinker.quality.bench.harness.report import Report, Row

Shape = Annotated[
    str | None,
    typer.Option(
        help="Random weights of this shape (tiny, 285m, 285m-hybrid, 215m-experts, 8b) in place of"
        " --model."
    ),
]
Json = Annotated[Path | None, typer.Option(help="Write the results to this file.")]
Plot = Annotated[
    Path | None, typer.Option(help="Draw the results to this file (.png, .svg, .pdf).")
]

MODEL_OPTIONS = ("model", "engine", "vllm_options", "dtype", "weights", "device", "threads")
QUALITY_OPTIONS = ("generation_context", "system_prompt", "chat_template", "max_model_len")

WIDTH_OF_FILES = 240


def show(report: Report, json: Path | None, rows: Sequence[Row] | None = None) -> None:
    """Print ``rows`` of a report, or all, with its warnings and notes; write all of it to
    ``json``."""
    from rich.console import Console

    for warning in report.warnings:
        warn(warning)
    console = Console()
    report.print(console if console.is_terminal else Console(width=WIDTH_OF_FILES), rows)
    if json is not None:
        report.write_json(json)
    for note in report.notes:
        typer.echo(note)


def require_folders(*files: Path | None) -> None:
    """Raise InvalidRequestError when one of the files to write lies in no folder, rather than after
    a long run."""
    from kvlinker.base.errors import InvalidRequestError

    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise InvalidRequestError(f"Cannot write {file}: there is no folder {file.parent}.")


def command_line(program: str = "kvlinker") -> str:
    """Return the command line that reproduces this run of ``program``."""
    return shlex.join([program, *sys.argv[1:]])


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Exit at SIGTERM and SIGHUP, so that the processes that this one has started end before it,
    and its temporary files are removed."""

    def exit_process(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        with suppress(ValueError):  # not in the main thread
            before[number] = signal.signal(number, exit_process)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
