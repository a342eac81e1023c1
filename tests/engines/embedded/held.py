"""Holds an engine between two steps, so that what is submitted meanwhile meets in the next one for
certain."""

from __future__ import annotations

import math
import threading
from typing import Any, Self

from kvlinker.engines.embedded.engine import EmbeddedEngine
from tests.waiting import PATIENCE, wait_until


class Held:
    """While the context lasts, the engine begins no step but those that ``let`` lets it."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine, self._step = engine, engine.runner.step
        self._changed = threading.Condition()
        self._permits = 0.0
        self._waits = False

    def __enter__(self) -> Self:
        self._engine.runner.step = self._held_step  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.runner.step = self._step  # type: ignore[method-assign]
        self._permit(math.inf)

    def wait(self) -> None:
        """Wait until the engine is about to begin a step."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._waits and not self._permits, PATIENCE)

    def let(self, steps: int) -> None:
        """Let the engine do so many steps; returns when it is about to begin the one behind
        them."""
        self._permit(steps)
        self.wait()

    def wait_until_ready(self, count: int) -> None:
        """Wait until so many answers have slots, or everything that they need to get some: all
        their chunks' KV. It has to be stored before, since nothing is computed now; and no more
        than 8 wait for slots with their KV at hand."""
        self.wait()
        scheduler = self._engine.scheduler

        def have_entered() -> bool:
            load = scheduler.load()
            return load.running + load.waiting - scheduler.loading >= count

        wait_until(have_entered)

    def _permit(self, steps: float) -> None:
        with self._changed:
            self._permits += steps
            self._changed.notify_all()

    def _held_step(self, *arguments: Any) -> Any:
        with self._changed:
            self._waits = True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._permits, PATIENCE)
            self._permits -= 1
            self._waits = False
        return self._step(*arguments)
