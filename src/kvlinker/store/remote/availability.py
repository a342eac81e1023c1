"""The circuit breaker of a remote tier: whether its medium is to be asked at all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 60.0


class Availability:
    """After a failure the medium is down: nobody asks it, until a thread of its own finds that it answers again.

    It is tried after ``pause`` seconds, and after twice as long each time as long as nothing but the trials succeeds,
    up to a minute. The start and the end of an outage are logged.
    """

    def __init__(self, name: str, place: str, trial: Callable[[], bool], *, pause: float) -> None:
        """``trial``: reach the medium, saying whether it answers; never raises."""
        self._name = name
        self._place = place
        self._trial = trial
        self._first_pause = self._pause = pause
        self._lock = threading.Lock()
        self._up = True
        self._closed = threading.Event()

    @property
    def up(self) -> bool:
        return self._up

    def failed(self, reason: str) -> None:
        """A call failed; only the first failure of an outage does anything."""
        with self._lock:
            if not self._up or self._closed.is_set():
                return
            self._up = False
        logger.warning(
            "Tier %s (%s) is left alone for now, and tried again every few seconds: %s", self._name, self._place, reason
        )
        threading.Thread(target=self._watch, name=f"kvlinker-{self._name}-watch", daemon=True).start()

    def succeeded(self) -> None:
        """A chunk was read or written: the next outage begins with a short pause again."""
        self._pause = self._first_pause

    def close(self) -> None:
        """Try no more. Idempotent."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(self._pause):
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            if self._trial():
                self._up = True
                logger.warning("Tier %s (%s) answers again", self._name, self._place)
                return
