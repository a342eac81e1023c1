"""Shows the progress of a call that computes many chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(chunks: int, shown: bool | None) -> Iterator[Callable[[], None]]:
    """Show a bar on stderr, or in a notebook's cell, until the block ends; what it gives is called
    for each of the ``chunks``, from any thread. ``shown``: None for notebooks alone."""
    console = Console(stderr=True)
    if not (console.is_jupyter if shown is None else shown):
        yield lambda: None
        return
    columns = (TextColumn("caching chunks"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=chunks)
        yield lambda: bar.advance(task)
