"""What other threads have the engine's thread do between two steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvlinker.engine.limits import engine_closed

Command = Callable[[], None]


class CommandQueue:
    """Commands in order of arrival, until it is closed.

    The engine's thread calls ``wait`` and ``next``. All else may be called from any thread, whatever locks it holds:
    nothing but the ``busy`` of ``wait`` is called under the queue's own, and that may take none.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._commands: deque[Command] = deque()  # guarded by _changed
        self._closed = False  # set under _changed, never unset

    @property
    def closed(self) -> bool:
        return self._closed

    def check_open(self) -> None:
        """Raises EngineClosedError once the queue was closed."""
        if self._closed:
            raise engine_closed()

    def put(self, command: Command) -> None:
        """Have the engine's thread run ``command`` before its next step. Raises EngineClosedError."""
        with self._changed:
            self.check_open()
            self._commands.append(command)
            self._changed.notify_all()

    def next(self) -> Command | None:
        """The oldest command, also of a closed queue; None when there is none."""
        with self._changed:
            return self._commands.popleft() if self._commands else None

    def wait(self, busy: Callable[[], bool]) -> bool:
        """Wait for a command, unless there is work without one: ``busy``. False when the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self._closed or busy())
            return not self._closed

    def wake(self) -> None:
        """Have ``wait`` look again whether the engine is busy."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more commands; those that came remain. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
