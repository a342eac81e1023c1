"""Counts which chunks requests want, so that a server that joins can read the hottest ones into
memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

HALVED_AFTER = 100_000
"""The uses after which all counts are halved: chunks that were hot long ago count less, and those
that were wanted once no longer count."""


class HotChunks:
    """Counts uses of chunks, which are numbers here."""

    def __init__(self) -> None:
        self._uses: Counter[int] = Counter()
        self._counted = 0

    def note(self, chunks: Iterable[int]) -> None:
        """Count a use of each chunk."""
        for chunk in chunks:
            self._uses[chunk] += 1
            self._counted += 1
        if self._counted >= HALVED_AFTER:
            self._counted = 0
            self._uses = Counter({chunk: n // 2 for chunk, n in self._uses.items() if n > 1})

    def hottest(self, most: int) -> list[int]:
        """Return the chunks that are wanted most often, those first, but none that was wanted only
        once."""
        return [chunk for chunk, uses in self._uses.most_common(most) if uses > 1]
