"""Output of commands: tables on stdout; on stderr warnings, progress, and the one line of an
error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from kvlinker.base.errors import KVLinkerError
from kvlinker.quality.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console

BAD_USAGE = 2
FAILURE = 1
ENGINE_FAILED = 3
INTERRUPTED = 130

UNLIMITED_WIDTH = 10_000
"""The columns of output that is no terminal: lines are not broken."""


def fail(message: str, code: int) -> typer.Exit:
    """Print the message; raise what this returns."""
    typer.echo(f"kvlinker: {message}", err=True)
    return typer.Exit(code)


def warn(message: str) -> None:
    """Print a warning."""
    typer.echo(f"kvlinker: warning: {message}", err=True)


@contextmanager
def failures(code: int = FAILURE) -> Iterator[None]:
    """End the command with ``code`` at kvlinker's errors; others are bugs, and keep their
    traceback."""
    try:
        yield
    except KVLinkerError as error:
        raise fail(error.message, code) from error


def output_console() -> Console:
    """Make the console of stdout for texts of callers: nothing in them is markup."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else UNLIMITED_WIDTH
    return Console(markup=False, emoji=False, highlight=False, width=width)


@contextmanager
def progress_display() -> Iterator[Progress]:
    """Show progress on stderr, with a bar if the work is counted."""
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Display

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
    )
    with Display(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as display:
        task = display.add_task("preparing the model", total=None, count="")

        def progress(what: str, done: int = 0, total: int | None = None, /) -> None:
            count = "" if total is None else f"{done}/{total}"
            display.update(task, description=what, completed=done, total=total, count=count)

        yield progress
