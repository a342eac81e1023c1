"""How fast each tier delivers, as measured while it does."""

from __future__ import annotations

import threading
import time

_WEIGHT = 0.3
"""Of a new measurement, beside all earlier ones."""

FRESH_SECONDS = 60.0
"""A measurement older than this decides nothing any more: the tier may have changed."""


class Bandwidths:
    """Bytes per second by tier: a moving average. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rates: dict[str, float] = {}
        self._measured_at: dict[str, float] = {}

    def note(self, tier: str, nbytes: int, seconds: float) -> None:
        """A tier delivered ``nbytes`` in ``seconds``."""
        if nbytes <= 0 or seconds <= 0:
            return
        rate = nbytes / seconds
        with self._lock:
            known = self._rates.get(tier, rate)
            self._rates[tier] = known + _WEIGHT * (rate - known)
            self._measured_at[tier] = time.monotonic()

    def of(self, tier: str) -> float | None:
        """None where nothing has been measured."""
        return self._rates.get(tier)

    def fresh(self, tier: str) -> bool:
        """Whether the last measurement is recent enough to decide against the tier."""
        return time.monotonic() - self._measured_at.get(tier, float("-inf")) < FRESH_SECONDS
