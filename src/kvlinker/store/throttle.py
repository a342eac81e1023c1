"""Makes background work give way to computations that need the same processors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

Rest = Callable[[], None]
"""Called between small pieces of background work; returns when the work may go on."""

SHARE = 0.05
"""The share of its time in which background work may go on while a computation is under way; chosen
by hand."""


def no_rest() -> None:
    """Return at once: the work may go on."""


class Throttle:
    """Makes background work rest while a computation is under way."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock`` measures how long background work takes."""
        self._clock = clock
        self.idle = threading.Event()
        """Cleared by the engine's thread while it computes on this machine's processors."""

        self.idle.set()

    def rests(self) -> Rest:
        """Return the rest for one thread's work, which begins now. Each call of it sleeps long
        enough that work takes ``SHARE`` of the time, and returns early when no computation is under
        way any more."""
        began = self._clock()

        def rest() -> None:
            nonlocal began
            worked = self._clock() - began
            until = time.monotonic() + worked * (1 / SHARE - 1)
            while not self.idle.is_set() and (left := until - time.monotonic()) > 0:
                self.idle.wait(left)  # it also returns where the next computation has begun
            began = self._clock()

        return rest
