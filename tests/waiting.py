"""Waits for what other threads and processes bring about. No test sleeps a time that it takes to be
long enough."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0
"""The seconds after which nothing more is expected, on a machine as busy as it may be."""

PAUSE = 0.002

BUSY_SHARE = 4
"""A wait pauses this many times as long as its condition takes, lest what it waits for lack the
processor."""


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Return as soon as the condition is true. Raises AssertionError where it is not in so many
    seconds."""
    deadline = time.monotonic() + seconds
    while True:
        asked = time.monotonic()
        if condition():
            return
        answered = time.monotonic()
        assert answered < deadline, f"it is not so after {seconds:.0f} s"
        time.sleep(max(PAUSE, BUSY_SHARE * (answered - asked)))
