"""How fast the engine computes, as measured while it does."""

from __future__ import annotations

from kvlinker.store.layer_loader import Urgency

_WEIGHT = 0.2
"""Of a new measurement, beside all earlier ones."""

_LEAST_TOKENS = 8
"""Steps of fewer tokens mostly wait for memory, and tell nothing of prompts."""


class Pace:
    """Prompt tokens per second: a moving average over steps. The engine's thread notes, any thread may ask."""

    def __init__(self, *, on_host: bool = False) -> None:
        """``on_host``: the engine computes where chunks are read."""
        self._on_host = on_host
        self._rate: float | None = None

    def note(self, tokens: int, seconds: float) -> None:
        """A step computed ``tokens`` in ``seconds``."""
        if tokens >= _LEAST_TOKENS and seconds > 0:
            rate = tokens / seconds
            self._rate = rate if self._rate is None else self._rate + _WEIGHT * (rate - self._rate)

    def urgency(self, *, computed: int, cached: int) -> Urgency:
        """Of loading ``cached`` tokens' KV for a prompt of which ``computed`` tokens are computed."""
        if self._rate is None:
            return Urgency(shares_processors=self._on_host)
        return Urgency(compute=computed / self._rate, prefill=cached / self._rate, shares_processors=self._on_host)
