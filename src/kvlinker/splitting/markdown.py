"""Where Markdown sections begin: at ATX headings (``# Title``), fenced code left in peace."""

from __future__ import annotations

import re
from collections.abc import Iterator

_LINE = re.compile(r"[^\r\n]*+(?>\r\n|\n|\r|$)")
_HEADING = re.compile(r" {0,3}#{1,6}(?:[ \t\r\n]|$)")
_FENCE = re.compile(r" {0,3}(?P<fence>`{3,}+(?=[^`]*$)|~{3,}+)(?P<info>.*)", re.DOTALL)


def sections(text: str) -> list[str]:
    """The text before the first heading, then one section per heading of any level; joined, they are the text."""
    starts = [0, *_heading_positions(text)]
    return [part for start, end in zip(starts, [*starts[1:], len(text)], strict=True) if (part := text[start:end])]


def _heading_positions(text: str) -> Iterator[int]:
    open_fence = ""
    for line in _LINE.finditer(text):
        content = line.group()
        fence = _FENCE.match(content)
        if open_fence:
            if fence and fence["fence"].startswith(open_fence) and not fence["info"].strip():
                open_fence = ""
        elif fence:
            open_fence = fence["fence"]
        elif _HEADING.match(content):
            yield line.start()
