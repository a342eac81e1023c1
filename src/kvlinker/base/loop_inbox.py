"""Hands calls from other threads to an event loop, which is woken once for many."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import ParamSpec

P = ParamSpec("P")

logger = logging.getLogger(__name__)


class LoopInbox:
    """Calls functions in an event loop, in the order in which they were put.

    An engine tells many requests of their tokens at once. Waking the loop takes a system call, in
    which it begins to compete with the engine's thread for Python's lock; so all that comes before
    the loop looks waits for the same wake-up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._calls: deque[Callable[[], None]] = deque()
        self._is_woken = False

    def put(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have the loop call a function. Any thread may put; when the loop is closed, nobody is
        called."""
        self._calls.append(partial(function, *args, **kwargs))
        if self._is_woken:
            return
        self._is_woken = True
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._empty)
        except RuntimeError:  # it was closed while an engine still cancelled
            self._calls.clear()
            self._is_woken = False

    def _empty(self) -> None:
        self._is_woken = False  # before the last look: who puts behind it wakes the loop again
        while self._calls:
            try:
                self._calls.popleft()()
            except Exception:
                logger.exception("A call that was handed to the event loop failed.")


_inboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopInbox] = (
    weakref.WeakKeyDictionary()
)
_making = threading.Lock()


def inbox_of(loop: asyncio.AbstractEventLoop) -> LoopInbox:
    """Return the inbox of an event loop, always the same. Any thread may ask."""
    with _making:
        inbox = _inboxes.get(loop)
        if inbox is None:
            inbox = _inboxes[loop] = LoopInbox(loop)
        return inbox
