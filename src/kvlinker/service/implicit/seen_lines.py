"""Notes which passages of texts were seen before, so that repeated ones can become chunks."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, islice, pairwise
from typing import NamedTuple

from kvlinker.prompting.segments import Span

MOST_SIGHTS = 16_384
"""The most units, and pairs of them, that are remembered of one tenant."""

LEAST_CHARACTERS = 256
"""The fewest characters of a passage that becomes a chunk: shorter ones are computed as quickly."""

LEAST_AVERAGE = 16
"""The fewest characters that the lines of a text have on average, unless there are few: others are
no prose."""

FEW_LINES = 64
"""The lines of a text that may have any length."""

_LINE = re.compile(r"\S[^\n]*")
_RULE = re.compile(r"[-=*_#~]{3,}")


class Line(NamedTuple):
    """Describes a line of a text, without the white space around it."""

    begin: int
    end: int
    digest: bytes
    """The SHA-256 of its text; empty for a rule such as ``---``, which stands between passages."""


class RecentDigests:
    """Remembers digests: of more than ``most``, those that were added last. Not thread safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, digests: Iterable[bytes]) -> None:
        """Remember digests, in their order."""
        for digest in digests:
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._most:
            self._digests.popitem(last=False)


class SeenLines:
    """Remembers units, and pairs of them that followed each other, by their SHA-256. Not thread
    safe."""

    def __init__(self) -> None:
        self._seen = RecentDigests(MOST_SIGHTS)

    def __len__(self) -> int:
        return len(self._seen)

    def seen(self, units: Sequence[Line]) -> list[Span]:
        """Return the passages that were seen before: units that followed each other then, too, if
        they are long enough together."""
        passages: list[Span] = []
        row: list[Line] = []
        for unit in units:
            known = unit.digest in self._seen
            if row and not (known and _pair(row[-1], unit) in self._seen):
                passages += _passage(row)
                row = []
            if known:
                row.append(unit)
        return passages + _passage(row)

    def note(self, units: Sequence[Line]) -> None:
        """Remember the units of one text."""
        pairs = (_pair(one, other) for one, other in pairwise(units) if one.digest and other.digest)
        self._seen.add(chain((unit.digest for unit in units if unit.digest), pairs))


def units_of(text: str, begin: int, end: int) -> list[Line]:
    """Return the units of ``text[begin:end]``, which are its lines; text in small shreds has
    none."""
    units = []
    most = FEW_LINES + (end - begin) // LEAST_AVERAGE
    for match in islice(_LINE.finditer(text, begin, end), most):
        first = match.start()
        line = match[0].rstrip()
        digest = (
            b""
            if _RULE.fullmatch(line)
            else hashlib.sha256(line.encode(errors="surrogatepass")).digest()
        )
        units.append(Line(first, first + len(line), digest))
    return units if len(units) < most else []


def paragraphs(text: str, units: Sequence[Line]) -> list[Span]:
    """Return the neighbouring units, up to the next empty line or rule, that are long enough for
    passages."""
    rows: list[list[Line]] = [[]]
    for unit in units:
        row = rows[-1]
        if row and (not unit.digest or text.count("\n", row[-1].end, unit.begin) != 1):
            rows.append([])
        if unit.digest:
            rows[-1].append(unit)
    return [span for row in rows for span in _passage(row)]


def _pair(one: Line, other: Line) -> bytes:
    return hashlib.sha256(one.digest + other.digest).digest()


def _passage(row: Sequence[Line]) -> list[Span]:
    if not row or row[-1].end - row[0].begin < LEAST_CHARACTERS:
        return []
    return [(row[0].begin, row[-1].end)]
