"""A clock for tests of what happens when time is up, or must not happen because it is not."""

from __future__ import annotations


class ManualClock:
    """Stands still, but for what it is put forward."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Put the clock forward."""
        self.now += seconds
