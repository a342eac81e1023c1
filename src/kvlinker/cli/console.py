"""What commands say on stderr: warnings, progress, and the one line with which they fail.

The exit code is 2 for bad usage and 1 for everything else that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from kvlinker.errors import KVLinkerError

BAD_USAGE = 2
FAILURE = 1


def fail(message: str, code: int) -> typer.Exit:
    """Print the message; raise what this returns."""
    typer.echo(f"kvlinker: {message}", err=True)
    return typer.Exit(code)


def warn(message: str) -> None:
    """Print a warning."""
    typer.echo(f"kvlinker: warning: {message}", err=True)


@contextmanager
def failures(code: int = FAILURE) -> Iterator[None]:
    """End the command with ``code`` at kvlinker's errors; others are bugs, and keep their traceback."""
    try:
        yield
    except KVLinkerError as error:
        raise fail(error.message, code) from error


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar of examples; what this gives takes how many are done, and of how many."""
    with described_progress() as advance:
        yield lambda done, total: advance("examples", done, total)


@contextmanager
def described_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar that says what it counts; what this gives takes that, how many are done, and of how many."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("preparing the model", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Show a line that says what is being measured, which what this gives changes."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("preparing the model") as status:
        yield status.update
