"""Divides the texts of a prompt into the pieces that its own structure names: definitions of tools,
messages, and paragraphs in them.

Where a piece begins and ends depends on the text near its edges alone, so that an edit changes the
piece that it is in, and at most those that are joined with it. Pieces begin with a line, and end
with the line feeds and the template's own text behind them: most tokenizers join punctuation with
the line feeds that follow it, so that other edges would have other token ids behind another text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple
from zlib import crc32

import numpy as np

from kvlinker.prompting.segments import Passage, PromptText

LEAST_TOKENS = 64
"""The fewest tokens of a piece: a shorter paragraph is joined with short ones beside it, and what
remains of those is computed, which takes no longer than linking it."""

JOINED_TOKENS = 256
"""The tokens at which short paragraphs are joined with no more: a change in one costs them all."""

LONG_TOKENS = 512
"""The tokens of a paragraph above which it is divided between lines."""

PART_TOKENS = 1024
"""The tokens at which a part of a long paragraph ends with its line in any case."""

_ONE_OF = 4
"""One in this many lines, or short paragraphs, ends a piece that is long enough. A hash of its text
chooses it, so that the same ones end pieces after an edit before them."""

_LINE = re.compile(r"\n(?=[ \t]*\S)")
_BLANK = re.compile(r"\n[ \t\r]*\n[ \t]*$")


class _Unit(NamedTuple):
    """A line, or a paragraph: characters [begin, end) of a text, and the number of its tokens."""

    begin: int
    end: int
    tokens: int


def pieces_of(texts: Iterable[PromptText]) -> list[Passage]:
    """Return the pieces of a prompt's texts, in order."""
    return [Passage(source, unit.begin, unit.end) for source in texts for unit in _pieces(source)]


def _pieces(source: PromptText) -> Iterator[_Unit]:
    """Yield the pieces of a text: long paragraphs, divided, and short ones, joined."""
    row: list[_Unit] = []
    for lines in _paragraphs(source):
        paragraph = _joined(lines)
        if paragraph.tokens < LEAST_TOKENS:
            row.append(paragraph)
            continue
        yield from _rows(source.text, row, JOINED_TOKENS)
        row = []
        if paragraph.tokens <= LONG_TOKENS:
            yield paragraph
        else:
            yield from _rows(source.text, lines, PART_TOKENS)
    yield from _rows(source.text, row, JOINED_TOKENS)


def _rows(text: str, units: Sequence[_Unit], most: int) -> Iterator[_Unit]:
    """Yield neighbouring units joined, up to one that ends a row by what it says, or to ``most``
    tokens. Too few tokens at the end are left out."""
    row: list[_Unit] = []
    tokens = 0
    for unit in units:
        row.append(unit)
        tokens += unit.tokens
        chosen = crc32(text[unit.begin : unit.end].encode(errors="surrogatepass")) % _ONE_OF == 0
        if tokens >= most or (tokens >= LEAST_TOKENS and chosen):
            yield _joined(row)
            row, tokens = [], 0
    if tokens >= LEAST_TOKENS:
        yield _joined(row)


def _joined(units: Sequence[_Unit]) -> _Unit:
    return _Unit(units[0].begin, units[-1].end, sum(unit.tokens for unit in units))


def _paragraphs(source: PromptText) -> Iterator[list[_Unit]]:
    """Yield the lines of each paragraph: up to an empty line, to where a message begins, or to
    where a definition begins or ends."""
    text = source.text
    begins = [begin for begin, _ in source.messages]
    begins += chain.from_iterable(source.definitions)
    anew = {_line_start(source, place) for place in begins}
    lines = (match.end() for match in _LINE.finditer(text))
    edges = _between_tokens(source, sorted({0, len(text), *lines, *anew}))
    paragraph: list[_Unit] = []
    for begin, end in pairwise(edges):
        if paragraph and (begin in anew or _BLANK.search(text, max(0, begin - 64), begin)):
            yield paragraph
            paragraph = []
        first, last = source.tokens_within(begin, end)
        paragraph.append(_Unit(begin, end, last - first))
    if paragraph:
        yield paragraph


def _line_start(source: PromptText, place: int) -> int:
    """Return the first character at the place or behind it that is no white space, or the space
    before it that is in one token with it."""
    text, starts = source.text, source.places.starts
    while place < len(text) and text[place].isspace():
        place += 1
    at = int(np.searchsorted(starts, place, side="right")) - 1
    token = int(starts[at]) if at >= 0 else place
    return token if text[token:place].isspace() else place


def _between_tokens(source: PromptText, edges: Sequence[int]) -> list[int]:
    """Return those of the edges, ascending, at which a token begins, or the text ends."""
    starts, ends = source.places
    kept = []
    for edge, index in zip(edges, np.searchsorted(starts, edges).tolist(), strict=True):
        begins = index < len(starts) and starts[index] == edge
        if edge in (0, len(source.text)) or (begins and not (index and ends[index - 1] > edge)):
            kept.append(edge)
    return kept
