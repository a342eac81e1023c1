"""Paragraphs, which end at blank lines, and sentences, which sentencex finds in them.

sentencex's rules know the stops of all scripts and the abbreviations of English. Where they are
wrong, a chunk is shorter or longer than one sentence, nothing more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import regex
import sentencex

from kvlinker.prompting.splitting.limit import TokenLimit
from kvlinker.prompting.splitting.splitter import Splitter, cut_at, register

_LANGUAGE = "en"
_WINDOW = 4096
"""The characters that sentencex reads at once: its time for quotation marks that are never closed
grows quadratically."""

_BLANK_LINES = re.compile(r"(?>\r\n|\n|\r)(?:[ \t\f\v]*+(?>\r\n|\n|\r))++")
_SPACE = regex.compile(r"\s*+")
_EMPHASIS_END = regex.compile(r"[*_]*+")
_GRAPHEME = regex.compile(r"\X")


@register
class SentenceSplitter(Splitter):
    """A piece is a sentence; one over the limit is cut between words."""

    name = "sentence"

    def split(self, text: str, limit: TokenLimit) -> list[str]:
        return sentences(text)


@register
class ParagraphSplitter(Splitter):
    """A piece is a paragraph; one over the limit is cut between sentences."""

    name = "paragraph"

    def split(self, text: str, limit: TokenLimit) -> list[str]:
        return limit.limited(
            paragraphs(text), cut=lambda paragraph: limit.packed(sentences(paragraph))
        )


@register
class PassageSplitter(Splitter):
    """A piece is as many whole paragraphs as fit; a paragraph over the limit is cut between
    sentences."""

    name = "passage"

    def split(self, text: str, limit: TokenLimit) -> list[str]:
        return passages(text, limit)


def paragraphs(text: str) -> list[str]:
    """Return the text's paragraphs, each with the blank lines after it; joined, they are the
    text."""
    return cut_at(text, (match.end() for match in _BLANK_LINES.finditer(text)))


def passages(text: str, limit: TokenLimit) -> list[str]:
    """Return pieces of as many whole paragraphs as fit; joined, they are the text."""
    return limit.packed(paragraphs(text), cut=lambda paragraph: limit.packed(sentences(paragraph)))


def sentences(text: str) -> list[str]:
    """Return the text's sentences; joined, they are the text. A blank line ends a sentence, too.

    Line breaks after a sentence belong to it; spaces belong to the next one, because that is how
    tokenizers see them.
    """
    return cut_at(text, _sentence_ends(text))


def _sentence_ends(text: str) -> Iterator[int]:
    start = 0
    for paragraph in paragraphs(text):
        content = paragraph.rstrip()
        for position in _stops(content):
            cut = _cut_position(content, position)
            if cut < len(content) and _GRAPHEME.match(content, cut - 1).end() == cut:
                yield start + cut
        start += len(paragraph)
        yield start


def _stops(paragraph: str) -> Iterator[int]:
    """Yield the ends of all sentences but the last, as sentencex finds them; a sentence that a
    window cuts short is read again in the next window."""
    start = 0
    while start < len(paragraph):
        boundaries = sentencex.get_sentence_boundaries(
            _LANGUAGE, paragraph[start : start + _WINDOW]
        )
        ends = [start + boundary["end_index"] for boundary in boundaries[:-1]]
        yield from ends
        start = ends[-1] if ends and start + _WINDOW < len(paragraph) else start + _WINDOW


def _cut_position(text: str, position: int) -> int:
    """Return the place to cut for a sentence that ends at ``position``, which may be before or
    after the whitespace there."""
    while position > 0 and text[position - 1].isspace():
        position -= 1
    end = _EMPHASIS_END.match(text, position).end()
    gap = _SPACE.match(text, end).end()
    line_break = max(text.rfind("\n", end, gap), text.rfind("\r", end, gap))
    return int(end if line_break < 0 else line_break + 1)
