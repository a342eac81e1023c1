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

    An engine delivers tokens to many requests at once. Waking the loop takes a system call, and the
    woken loop competes with the engine's thread for Python's lock. So one wake-up serves all calls
    that are put before the loop runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._calls: deque[Callable[[], None]] = deque()
        self._is_woken = False

    def put(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Schedule a call of ``function`` in the loop, from any thread. A closed loop drops the
        call."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            self._calls.clear()
            return
        self._calls.append(partial(function, *args, **kwargs))
        if self._is_woken:
            return
        self._is_woken = True
        try:
            loop.call_soon_threadsafe(self._empty)
        except RuntimeError:  # it was closed meanwhile
            self._calls.clear()

    def _empty(self) -> None:
        self._is_woken = (
            False  # before the last look: a thread that puts after it wakes the loop again
        )
        while self._calls:
            try:
                self._calls.popleft()()
            except Exception:
                logger.exception("A call that was handed to the event loop failed.")


_inboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[LoopInbox]] = (
    weakref.WeakKeyDictionary()
)
"""Inboxes by event loop. Both sides are weak: callers of ``put`` keep an inbox alive, and its calls
may keep the loop alive."""

_making = threading.Lock()


def inbox_of(loop: asyncio.AbstractEventLoop) -> LoopInbox:
    """Return the one inbox of an event loop. Any thread may call it."""
    with _making:
        known = _inboxes.get(loop)
        inbox = None if known is None else known()
        if inbox is None:
            inbox = LoopInbox(loop)
            _inboxes[loop] = weakref.ref(inbox)
        return inbox
