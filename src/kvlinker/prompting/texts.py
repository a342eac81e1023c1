"""Holds the texts of a prompt beside their token ids, so that parts of them can become chunks
without any other id in the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]
"""Characters [begin, end) of a text."""


class TokenPlaces(NamedTuple):
    """The places of a text's tokens: the index of each one's first character, and of the one after
    its last; ascending, [tokens] each. The tokens of one character share both."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class PromptText:
    """A text of a prompt between two chunks, or between one and the prompt's end."""

    text: str

    places: TokenPlaces
    """Where its tokens stand in it."""

    first: int = 0
    """The position of its first token in the prompt."""

    messages: tuple[Span, ...] = ()
    """Where texts of messages, or parts of a completion, stand in it, ascending and apart."""

    definitions: tuple[Span, ...] = ()
    """Where definitions of tools stand in it, ascending and apart."""

    before: str = ""
    """Names the chunks between the text before it and this one."""

    @property
    def sections(self) -> list[Span]:
        """Its messages, its definitions, and what stands between them, in order."""
        quoted = chain.from_iterable((*self.messages, *self.definitions))
        return list(pairwise(sorted({0, len(self.text), *quoted})))

    def tokens_within(self, begin: int, end: int) -> Span:
        """Return the positions [first, last) in the prompt of the tokens that lie within the
        characters [begin, end)."""
        starts, ends = self.places
        first = int(np.searchsorted(starts, begin))
        last = max(first, int(np.searchsorted(starts, end)))
        while last > first and ends[last - 1] > end:
            last -= 1
        return self.first + first, self.first + last


class Passage(NamedTuple):
    """A part of a prompt's text that is, or may become, a chunk: characters [begin, end)."""

    source: PromptText
    begin: int
    end: int

    @property
    def text(self) -> str:
        """Its characters."""
        return self.source.text[self.begin : self.end]

    @property
    def tokens(self) -> Span:
        """The positions [first, last) of its tokens in the prompt."""
        return self.source.tokens_within(self.begin, self.end)


@dataclass(frozen=True, slots=True)
class Quotes:
    """The texts that a rendered prompt shows: one that the chat template changes is not found, and
    is a part of the text around it."""

    messages: Sequence[str]
    """Texts of messages, in their order."""

    definitions: Sequence[str] = ()
    """Definitions of tools, which may stand anywhere."""

    def messages_in(self, text: str) -> tuple[Span, ...]:
        """Return where texts of messages stand in a text of the prompt."""
        found: list[Span] = []
        end = 0
        for quoted in self.messages:
            if quoted and (begin := text.find(quoted, end)) >= 0:
                end = begin + len(quoted)
                found.append((begin, end))
        return tuple(found)

    def definitions_in(self, text: str) -> tuple[Span, ...]:
        """Return where definitions of tools stand in a text of the prompt."""
        found: list[Span] = []
        places = ((text.find(quoted), len(quoted)) for quoted in self.definitions if quoted)
        for begin, length in sorted(places):
            if begin >= (found[-1][1] if found else 0):
                found.append((begin, begin + length))
        return tuple(found)
