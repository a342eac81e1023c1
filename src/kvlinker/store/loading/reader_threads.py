"""The threads that read slower tiers: few, and replaced where a read never returns. The layer loader has them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Protocol

logger = logging.getLogger(__name__)

MOST_ABANDONED = 8
"""Threads that may hang before no further one is replaced."""

CLOSE_SECONDS = 5.0
"""For threads to end what they are doing; those that hang do not hold up the process's end."""


class Task(Protocol):
    """What one thread does. Neither raises."""

    def run(self) -> None: ...

    def end(self) -> None:
        """After ``run``, or in its place where that is never called."""
        ...


class ReaderThreads:
    """A fixed number of threads for tasks, first come, first served. Methods may be called from any thread."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._waiting: deque[Task] = deque()
        self._threads: set[threading.Thread] = set()  # but for abandoned ones
        self._running: dict[threading.Thread, Task] = {}
        self._abandoned: set[threading.Thread] = set()
        self._closed = False

    def submit(self, task: Task) -> None:
        """Have a thread run the task; where they are closed, it only ends."""
        with self._changed:
            if not self._closed:
                self._waiting.append(task)
                if len(self._waiting) + len(self._running) > len(self._threads):
                    self._start_one()
                self._changed.notify()
                return
        task.end()

    def abandon(self, task: Task) -> None:
        """The task hangs: another thread takes its thread's place, which ends when the task does. Nothing happens where
        the task is not running."""
        with self._changed:
            thread = next((thread for thread, running in self._running.items() if running is task), None)
            if thread is None or thread in self._abandoned or self._closed:
                return
            self._abandoned.add(thread)
            self._threads.discard(thread)
            hanging = len(self._abandoned)
            self._start_one()
        replaced = "another thread reads on" if hanging <= MOST_ABANDONED else "no other takes its place: too many hang"
        logger.warning("A read from a tier does not return (%d hang now); %s.", hanging, replaced)

    def close(self) -> None:
        """Let running tasks end, and all others only end. Idempotent."""
        with self._changed:
            self._closed = True
            left = tuple(self._waiting)
            self._waiting.clear()
            threads = tuple(self._threads)
            self._changed.notify_all()
        for task in left:
            task.end()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_one(self) -> None:
        """Unless there are enough, or too many hang; the lock is held."""
        most = min(self._count, self._count + MOST_ABANDONED - len(self._abandoned))
        if len(self._threads) < most:
            thread = threading.Thread(target=self._work, name="kvlinker-layers", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _work(self) -> None:
        me = threading.current_thread()
        while (task := self._next(me)) is not None:
            try:
                task.run()
            finally:
                task.end()
                self._done(me)

    def _next(self, me: threading.Thread) -> Task | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed or me not in self._threads)
            if me not in self._threads or not self._waiting:
                return None
            self._running[me] = task = self._waiting.popleft()
            return task

    def _done(self, me: threading.Thread) -> None:
        with self._changed:
            del self._running[me]
            if me in self._abandoned:
                self._abandoned.discard(me)
                if self._waiting:
                    self._start_one()  # where there were too many
