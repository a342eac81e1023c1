"""Shows an answer while it is generated: Markdown on a terminal, otherwise plain text."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from kvlinker.cli.chat.conversation import Written

REFRESH_SECONDS = 0.1
"""The least time between two drawings of a block: each lays the whole block out."""


def show_answer(pieces: Iterator[Written]) -> None:
    """Write an answer to stdout as it comes. At an interrupt, the rest is cancelled."""
    with closing(pieces):  # type: ignore[type-var]
        if sys.stdout.isatty():
            _show_markdown(pieces)
        else:
            for written in pieces:
                if not written.reasoning:
                    print(written.text, end="", flush=True)
            print()


def _show_markdown(pieces: Iterable[Written]) -> None:
    """Print each block of Markdown when the next one begins; the last one is drawn anew as it
    grows."""
    console = Console()
    text, thinking, drawn = "", False, 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        try:
            for written in pieces:
                if thinking and not written.reasoning:
                    text = _print_blocks(console, text, reasoning=True, ended=True)
                thinking = written.reasoning
                text = _print_blocks(console, text + written.text, reasoning=thinking)
                if time.monotonic() - drawn >= REFRESH_SECONDS:
                    live.update(_End(_laid_out(text, thinking)), refresh=True)
                    drawn = time.monotonic()
        finally:
            live.update("", refresh=True)
            _print_blocks(console, text, reasoning=thinking, ended=True)


def _print_blocks(console: Console, text: str, *, reasoning: bool, ended: bool = False) -> str:
    """Print the blocks of a text that are complete, which are all but the last, and return the
    rest."""
    starts = [
        token.map[0]
        for token in MarkdownIt("commonmark").enable("table").parse(text)
        if token.level == 0 and token.map and token.nesting >= 0
    ]
    lines = text.splitlines(keepends=True)
    end = len(lines) if ended else (starts[-1] if starts else 0)
    if (complete := "".join(lines[:end])).strip():
        console.print(_laid_out(complete, reasoning))
        console.print()
    return "".join(lines[end:])


def _laid_out(text: str, reasoning: bool) -> Markdown | Text:
    return Text(text.strip(), style="dim italic") if reasoning else Markdown(text)


class _End:
    """Draws the last lines of what is higher than the terminal."""

    def __init__(self, shown: Markdown | Text) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._shown, options.update(height=None), pad=False)
        for line in lines[-(console.height - 1) :]:
            yield from line
            yield Segment.line()
