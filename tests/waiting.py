"""Waits for what other threads and processes bring about. No test sleeps a time that it takes to be
long enough."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0
"""The seconds after which nothing more is expected, on a machine as busy as it may be."""

PAUSE = 0.002


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Return as soon as the condition is true. Raises AssertionError where it is not in so many
    seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it is not so after {seconds:.0f} s"
        time.sleep(PAUSE)
