"""Where paragraphs end: at blank lines."""

from __future__ import annotations

import re

_PARAGRAPH_END = re.compile(r"(?>\r\n|\n|\r)(?:[ \t\f\v]*+(?>\r\n|\n|\r))++")


def paragraphs(text: str) -> list[str]:
    """The text's paragraphs, each with the blank lines after it; joined, they are the text."""
    ends = [match.end() for match in _PARAGRAPH_END.finditer(text)]
    return [part for start, end in zip([0, *ends], [*ends, len(text)], strict=True) if (part := text[start:end])]
