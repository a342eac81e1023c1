"""Notes which passages of texts were seen before, so that those that come again can become chunks."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain, islice, pairwise
from typing import NamedTuple

from kvlinker.implicit.known import Span

MOST_SIGHTS = 16_384
"""The most units, and pairs of them, that are remembered of one tenant; those that were seen last stay."""

LEAST_CHARACTERS = 256
"""The fewest characters of a passage that becomes a chunk: shorter ones are computed as quickly."""

LEAST_AVERAGE = 16
"""The fewest characters that the lines of a text have on average, unless it is short: others are no prose."""

_LINE = re.compile(r"\S[^\n]*")
_RULE = re.compile(r"[-=*_#~]{3,}")


class Unit(NamedTuple):
    """A line of a text without the white space around it."""

    begin: int
    end: int
    digest: bytes
    """The SHA-256 of its text; empty for a rule such as ``---``, which stands between passages."""


class Sights:
    """Remembers units, and pairs of them that followed each other, by their SHA-256. Not thread safe."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def seen(self, units: Sequence[Unit]) -> list[Span]:
        """Return the passages that were seen before: units that followed each other then, too, if they are long enough
        together."""
        passages: list[Span] = []
        row: list[Unit] = []
        for unit in units:
            known = unit.digest in self._seen
            if row and not (known and _pair(row[-1], unit) in self._seen):
                passages += _passage(row)
                row = []
            if known:
                row.append(unit)
        return passages + _passage(row)

    def note(self, units: Sequence[Unit]) -> None:
        """Remember the units of one text."""
        pairs = (_pair(one, other) for one, other in pairwise(units) if one.digest and other.digest)
        for digest in chain((unit.digest for unit in units if unit.digest), pairs):
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > MOST_SIGHTS:
            self._seen.popitem(last=False)


def units_of(text: str, begin: int, end: int) -> list[Unit]:
    """Return the units of ``text[begin:end]``, which are its lines; text in small shreds has none."""
    units = []
    for match in islice(_LINE.finditer(text, begin, end), 64 + (end - begin) // LEAST_AVERAGE):
        first = match.start()
        line = match[0].rstrip()
        digest = b"" if _RULE.fullmatch(line) else hashlib.sha256(line.encode(errors="surrogatepass")).digest()
        units.append(Unit(first, first + len(line), digest))
    return units if len(units) < 64 + (end - begin) // LEAST_AVERAGE else []


def _pair(one: Unit, other: Unit) -> bytes:
    return hashlib.sha256(one.digest + other.digest).digest()


def _passage(row: Sequence[Unit]) -> list[Span]:
    if not row or row[-1].end - row[0].begin < LEAST_CHARACTERS:
        return []
    return [(row[0].begin, row[-1].end)]
