"""Makes background work give way to computations that need the same processors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Rest = Callable[[], None]
"""Called between small pieces of background work; returns when the work may go on."""

SHARE = 0.05
"""The share of its time in which background work may go on while a computation is under way; chosen
by hand."""


def no_rest() -> None:
    """Return at once: the work may go on."""


class Throttle:
    """Tracks whether a computation is under way, and makes background work rest meanwhile."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock`` measures how long background work takes."""
        self._clock = clock
        self._changed = threading.Condition()
        self._computations = 0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Enter around a computation on this machine's processors; any thread, also several at
        once."""
        with self._changed:
            self._computations += 1
        try:
            yield
        finally:
            with self._changed:
                self._computations -= 1
                self._changed.notify_all()

    def rests(self) -> Rest:
        """Return the rest for one thread's work, which begins now. Each call of it sleeps long
        enough that work takes ``SHARE`` of the time, and returns early when no computation is under
        way any more."""
        began = self._clock()

        def rest() -> None:
            nonlocal began
            worked = self._clock() - began
            with self._changed:
                self._changed.wait_for(lambda: not self._computations, worked * (1 / SHARE - 1))
            began = self._clock()

        return rest
