"""Sections of Markdown documents, whose headings markdown-it-py finds as CommonMark defines
them."""

from __future__ import annotations

import re
from itertools import accumulate

from markdown_it import MarkdownIt

from kvlinker.prompting.splitting.limit import TokenLimit
from kvlinker.prompting.splitting.methods.prose import passages
from kvlinker.prompting.splitting.splitter import Splitter, cut_at, register

_LINE = re.compile(r"[^\r\n]*+(?>\r\n|\n|\r|$)")


@register
class MarkdownSplitter(Splitter):
    """A piece is the section under one heading of any level; one over the limit becomes
    passages."""

    name = "markdown"

    def split(self, text: str, limit: TokenLimit) -> list[str]:
        return limit.limited(sections(text), cut=lambda section: passages(section, limit))


def sections(text: str) -> list[str]:
    """Return the text before the first heading, then one section per heading; joined, they are the
    text."""
    parser = MarkdownIt("commonmark")
    parser.core.ruler.enableOnly(["normalize", "block"])
    line_starts = [0, *accumulate(len(line) for line in _LINE.findall(text))]
    headings = (
        token.map
        for token in parser.parse(text)
        if token.type == "heading_open" and token.level == 0
    )
    return cut_at(text, (line_starts[lines[0]] for lines in headings if lines))
