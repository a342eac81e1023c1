"""The limit of a piece in tokens: counts them, packs pieces that fit together, and cuts those that
are too long.

Tokenizers are not additive: two pieces joined may have more or fewer tokens than both alone. So
every piece is encoded as it will stand alone; the token boundaries of the whole text only suggest
where to cut.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate

import regex

from kvlinker.base.errors import InvalidRequestError
from kvlinker.prompting.encoding import TextEncoder

_GRAPHEME = regex.compile(r"\X")


class TokenLimit:
    """Packs and cuts the pieces of one text, so that each encodes to at most ``max_tokens`` ids
    when alone."""

    def __init__(
        self, encoder: TextEncoder, max_tokens: int, most_pieces: int | None = None
    ) -> None:
        """``most_pieces`` are the most that a text may have in the end; None for any number."""
        self.max_tokens = max_tokens
        self._most_pieces = most_pieces
        self._encoder = encoder
        self._counts: dict[str, int] = {}
        self._read: tuple[str, list[int]] = (
            "",
            [],
        )  # the text whose token starts were asked for last, and these

    def check_pieces(self, count: int) -> None:
        """Raises InvalidRequestError for more pieces than a text may have."""
        if self._most_pieces is not None and count > self._most_pieces:
            raise InvalidRequestError(
                f"The text makes more than {self._most_pieces:,} pieces of {self.max_tokens:,}"
                " tokens. Send it in parts, or allow pieces of more tokens.",
                param="text",
            )

    def counts(self, pieces: Sequence[str]) -> list[int]:
        """Return the number of ids of each piece."""
        unknown = list({piece for piece in pieces if piece not in self._counts})
        self._counts.update(zip(unknown, self._encoder.count_data(unknown), strict=True))
        return [self._counts[piece] for piece in pieces]

    def token_starts(self, text: str) -> list[int]:
        """Return the index of the first character of each token; a text is encoded once, however
        often it is asked for in a row."""
        if self._read[0] != text:
            self._read = (text, self._encoder.token_starts(text))
        return self._read[1]

    def fits(self, piece: str) -> bool:
        return self.counts([piece])[0] <= self.max_tokens

    def limited(
        self, pieces: Sequence[str], cut: Callable[[str], list[str]] | None = None
    ) -> list[str]:
        """Return the pieces, with those over the limit replaced by the result of ``cut``; by
        default, they are cut between words."""
        shortened = cut or partial(self.cut, at_words=True)
        result: list[str] = []
        self.check_pieces(len(pieces))
        for piece, count in zip(pieces, self.counts(pieces), strict=True):
            result += [piece] if count <= self.max_tokens else shortened(piece)
            self.check_pieces(len(result))
        return result

    def packed(
        self, pieces: Sequence[str], cut: Callable[[str], list[str]] | None = None
    ) -> list[str]:
        """Join as many neighbouring pieces as fit, and return the result; those over the limit are
        cut as in ``limited``."""
        text = "".join(pieces)
        starts = self.token_starts(text)
        ends = [0, *accumulate(len(piece) for piece in pieces)]
        tokens = [bisect_left(starts, end) for end in ends]
        result: list[str] = []
        first = 0
        while first < len(pieces):
            last = max(first + 1, bisect_right(tokens, tokens[first] + self.max_tokens) - 1)
            while last > first + 1 and not self.fits(text[ends[first] : ends[last]]):
                last -= 1
            while last < len(pieces) and self.fits(text[ends[first] : ends[last + 1]]):
                last += 1
            result.append(text[ends[first] : ends[last]])
            self.check_pieces(len(result))
            first = last
        return self.limited(result, cut)

    def cut(self, text: str, *, at_words: bool = False) -> list[str]:
        """Cut the text into pieces as long as the limit allows; ``at_words``: or down to half as
        long where that lets them end between words.

        Raises InvalidRequestError if a single character is over the limit.
        """
        starts = self.token_starts(text)
        pieces = []
        begin = 0
        while begin < len(text):
            end = self._longest(text, begin, starts, at_words=at_words)
            pieces.append(text[begin:end])
            self.check_pieces(len(pieces))
            begin = end
        return pieces

    def without_blanks(self, pieces: Iterable[str]) -> list[str]:
        """Return the pieces, with those of whitespace alone joined to a neighbour wherever the
        limit allows."""
        result: list[str] = []
        for piece in pieces:
            self._join(result, piece)
            if len(result) > 1 and self.is_blank(result[-1]):
                blank, left = result.pop(), result.pop()
                for part in self._shared(left, blank):
                    self._join(result, part)
        return result

    def is_blank(self, piece: str) -> bool:
        """Return whether a piece is whitespace only, or encodes to no tokens."""
        return piece.isspace() or self.counts([piece]) == [0]

    def _join(self, pieces: list[str], piece: str) -> None:
        """Add ``piece`` to the last of ``pieces`` if one of the two is blank and both fit, or else
        as a new one."""
        blank = pieces and (self.is_blank(piece) or self.is_blank(pieces[-1]))
        if blank and self.fits(pieces[-1] + piece):
            pieces[-1] += piece
        else:
            pieces.append(piece)

    def _longest(self, text: str, begin: int, starts: list[int], *, at_words: bool) -> int:
        """Return the end of the longest piece from ``begin`` on that is within the limit;
        ``starts`` are the token starts. Where not one whole token fits, because its parts are more
        tokens when they stand alone, the piece may be half as long as it could be."""
        token = bisect_left(starts, begin)
        budget = self.max_tokens
        end = len(text)
        while True:
            if budget > 0:
                target = starts[token + budget] if token + budget < len(starts) else len(text)
            else:
                first = _GRAPHEME.match(text, begin, end).end()
                target = max((begin + end) // 2, first if first < end else begin)
            end = _cut_position(text, begin, target, at_words=at_words)
            excess = self.counts([text[begin:end]])[0] - self.max_tokens
            if excess <= 0:
                return end
            if end == begin + 1:
                raise InvalidRequestError(
                    f"'max_tokens' is {self.max_tokens}, but the character {text[begin]!r} alone"
                    f" takes {excess + self.max_tokens} tokens. Allow at least that many.",
                    param="max_tokens",
                )
            budget -= excess

    def _shared(self, left: str, blank: str) -> list[str]:
        """Return ``left`` and ``blank``, with the end of ``left`` moved to ``blank`` if both then
        are within the limit."""
        last = len(left.rstrip()) - 1
        for cut in (_last_word_boundary(left, 0, last), _grapheme_start(left, 0, last)):
            head, tail = left[:cut], left[cut:] + blank
            if cut > 0 and not self.is_blank(head) and self.fits(head) and self.fits(tail):
                return [head, tail]
        return [left, blank]


def _cut_position(text: str, begin: int, target: int, *, at_words: bool) -> int:
    """Return the best place for a cut after ``begin`` and not after ``target``, at least one
    character on."""
    if target >= len(text):
        return len(text)
    if target <= begin + 1:
        return begin + 1
    if at_words:
        half = (begin + target) // 2
        position = _last_word_boundary(text, half, target)
        if position > half:
            return position
    position = _grapheme_start(text, begin, target)
    return position if position > begin else target


def _last_word_boundary(text: str, begin: int, end: int) -> int:
    """Return the last position in (begin, end] where a cut goes between words; ``begin`` if there
    is none."""
    return next(
        (position for position in range(end, begin, -1) if _is_word_boundary(text, position)), begin
    )


def _is_word_boundary(text: str, position: int) -> bool:
    """Return whether a word ends or a line begins here; the space before a word belongs to the
    word."""
    before, after = text[position - 1], text[position]
    if before in "\r\n":
        return after not in "\r\n"
    return after.isspace() and not before.isspace() and after not in "\r\n"


def _grapheme_start(text: str, begin: int, position: int) -> int:
    """Return the start of the user-perceived character at ``position``, with characters counted
    from ``begin`` on."""
    around = text[position - 1 : position + 1]
    if position > begin and around.isascii() and around != "\r\n":
        return position
    start = 0
    for grapheme in _GRAPHEME.finditer(text[begin : position + 1]):
        start = grapheme.start()
    return begin + start
