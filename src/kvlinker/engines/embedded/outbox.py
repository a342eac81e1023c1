"""Holds events for callers back until the model computes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Outbox:
    """Keeps calls of sinks, in order, until ``flush``.

    A caller that gets an event wakes up, and competes with the engine's thread for Python's lock.
    So callers get all tokens of a step at once, when the engine's thread is about to run the model,
    which needs the lock little, or not at all where native code computes the step.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._flushing = threading.RLock()
        self._owner: int | None = None

    def own(self) -> None:
        """Hold back the calls that this thread puts from now on: it promises to ``flush``. A call
        of another thread is made at once, after all that were held back."""
        self._owner = threading.get_ident()

    def disown(self) -> None:
        """Make all calls, and hold none back any more."""
        self._owner = None
        self.flush()

    def put(self, call: Callable[[], None]) -> None:
        """Make the call, which raises nothing, at the next ``flush``; at once in a thread that does
        not own the box."""
        self._calls.append(call)
        if threading.get_ident() != self._owner:
            self.flush()

    def flush(self) -> None:
        """Make all calls that were held back. Any thread may call it."""
        while self._calls:
            with self._flushing:
                if self._calls:
                    self._calls.popleft()()
