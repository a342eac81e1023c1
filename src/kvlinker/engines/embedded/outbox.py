"""Puts off what callers are told until the model computes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Outbox:
    """Keeps calls that tell callers something, in order, until ``flush``.

    Who is told wakes up, and competes with the engine's thread for Python's lock. So callers are
    told of all tokens of a step at once, when the engine's thread is about to run the model, which
    needs no lock.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._flushing = threading.RLock()
        self._owner: int | None = None

    def own(self) -> None:
        """Put off what this thread says from now on: it promises to ``flush``. What other threads
        say is told at once, behind what was put off."""
        self._owner = threading.get_ident()

    def disown(self) -> None:
        """Tell what was put off, and put nothing off any more."""
        self._owner = None
        self.flush()

    def put(self, call: Callable[[], None]) -> None:
        """Make the call, which raises nothing, at the next ``flush``; at once in a thread that does
        not own the box."""
        self._calls.append(call)
        if threading.get_ident() != self._owner:
            self.flush()

    def flush(self) -> None:
        """Make all calls that were put off. Any thread may call it."""
        while self._calls:
            with self._flushing:
                if self._calls:
                    self._calls.popleft()()
