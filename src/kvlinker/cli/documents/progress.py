"""Shows the progress of an ingestion on stderr: a bar on a terminal, otherwise a line every few
seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

LINE_SECONDS = 5.0
"""The seconds between two lines of progress where there is no terminal."""

NAME_COLUMNS = 28
"""The columns of a file's name, which leave room for bar and figures on 80."""

Report = Callable[[str, int, int, str], None]
"""Takes a file's name, the amounts done and to be done in all, and their unit."""


class _Rate(ProgressColumn):
    """Shows units per second."""

    def render(self, task: Task) -> Text:
        if task.speed is None:
            return Text("")
        return Text(f"{task.speed:,.0f} {task.fields['unit']}/s")


@contextmanager
def show_progress() -> Iterator[Report]:
    """Show a bar. Its callers write nothing else to stderr meanwhile."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines().report
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f}%"),
    )
    with Progress(
        *columns,
        _Rate(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
    ) as progress:
        task = progress.add_task("", total=None, unit="")

        def report(file: str, done: int, total: int, unit: str) -> None:
            shown = file if len(file) <= NAME_COLUMNS else f"…{file[1 - NAME_COLUMNS :]}"
            progress.update(task, description=shown, completed=done, total=total, unit=unit)

        yield report


class _Lines:
    """Writes a line of progress every ``LINE_SECONDS``."""

    def __init__(self) -> None:
        self._started = self._written = time.monotonic()

    def report(self, file: str, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        if now - self._written < LINE_SECONDS:
            return
        self._written = now
        rate = done / (now - self._started)
        left = f", {(total - done) / rate:.0f} s left" if rate else ""
        typer.echo(
            f"kvlinker: {done:,} of {total:,} {unit} ({100 * done / total:.0f}%), {rate:,.0f}"
            f" {unit}/s{left}: {file}",
            err=True,
        )
