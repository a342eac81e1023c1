"""A clock for tests of what happens when time is up, or must not happen because it is not."""

from __future__ import annotations

import threading


class ManualClock:
    """Stands still, but for what it is put forward."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Put the clock forward; any thread may."""
        with self._lock:
            self.now += seconds
