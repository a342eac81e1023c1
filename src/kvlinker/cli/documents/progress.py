"""Shows ingestion progress on stderr: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

LINE_SECONDS = 5.0
"""The seconds between two lines of progress where there is no terminal."""

Advance = Callable[[str, int], None]
"""Is called with a file's name and the number of its tokens that were cached since the last
call."""


class _Rate(ProgressColumn):
    """Shows tokens per second."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f} tokens/s")


@contextmanager
def show_progress(total: int) -> Iterator[Advance]:
    """Show the progress of ``total`` tokens."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(total).advance
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:,}/{task.total:,} tokens"),
    )
    with Progress(
        *columns,
        _Rate(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # otherwise results would go to stderr
    ) as progress:
        task = progress.add_task("", total=total)

        def advance(file: str, tokens: int) -> None:
            progress.update(task, description=file, advance=tokens)

        yield advance


class _Lines:
    """Writes a line of progress every ``LINE_SECONDS``."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._started = self._written = time.monotonic()

    def advance(self, file: str, tokens: int) -> None:
        self._done += tokens
        now = time.monotonic()
        if now - self._written < LINE_SECONDS:
            return
        self._written = now
        rate = self._done / (now - self._started)
        left = (self._total - self._done) / rate
        share = 100 * self._done / self._total
        typer.echo(
            f"kvlinker: {self._done:,} of {self._total:,} tokens ({share:.0f}%), {rate:,.0f}"
            f" tokens/s, {left:.0f} s left: {file}",
            err=True,
        )
