"""Adds up where time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Profile:
    """Adds up the wall time of named parts in ``seconds``; time in a nested part counts for the
    nested part only."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = 0.0

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the wall time of the block to ``part``."""
        before, self._inner = self._inner, 0.0
        begin = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - begin
            self.seconds[part] += elapsed - self._inner
            self._inner = before + elapsed
