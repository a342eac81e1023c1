"""How fast each tier delivers, as measured while it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from statistics import fmean

from kvlinker.store.codecs import Codec
from kvlinker.store.encryption import Sealing
from kvlinker.store.speeds import DRIFT, DRIFT_NOTES, Speeds

_WEIGHT = 0.3
"""Of a new measurement, beside all earlier ones."""

FRESH_SECONDS = 60.0
"""A measurement older than this decides nothing any more: the tier may have changed."""


class Bandwidths:
    """Bytes per second by tier: a moving average, which begins anew where it drifts from what is measured now. Methods
    may be called from any thread."""

    def __init__(self, speeds: Speeds | None = None, names: Mapping[str, str] | None = None) -> None:
        """``speeds`` keeps what is measured, under the tiers' ``names`` (by tier; the tier itself, where there is
        none)."""
        self._speeds = speeds or Speeds()
        self._names = dict(names or {})
        self._lock = threading.Lock()
        self._measured_at: dict[str, float] = {}
        self._drifting: dict[str, list[float]] = {}  # the last rates, while they are off

    def note(self, tier: str, nbytes: int, seconds: float) -> None:
        """A tier delivered ``nbytes`` in ``seconds``."""
        if nbytes <= 0 or seconds <= 0:
            return
        rate = nbytes / seconds
        with self._lock:
            self._speeds.note(self._name(tier), [self._averaged(tier, rate)])
            self._measured_at[tier] = time.monotonic()

    def of(self, tier: str) -> float | None:
        """None where nothing has been measured, or not for a long time."""
        values = self._speeds.of(self._name(tier))
        return values[0] if values else None

    def known(self) -> dict[str, float]:
        """All that is measured, by tier."""
        rates = {tier: self.of(tier) for tier in self._names}
        return {tier: rate for tier, rate in rates.items() if rate is not None}

    def fresh(self, tier: str) -> bool:
        """Whether the last measurement is recent enough to decide against the tier."""
        return time.monotonic() - self._measured_at.get(tier, float("-inf")) < FRESH_SECONDS

    def _averaged(self, tier: str, rate: float) -> float:
        known = self.of(tier)
        drifting = self._drifting.setdefault(tier, [])
        if known is None or abs(rate - known) <= DRIFT * known:
            drifting.clear()
        else:
            drifting.append(rate)
        if len(drifting) == DRIFT_NOTES:
            average = fmean(drifting)
            drifting.clear()
            return average
        return rate if known is None else known + _WEIGHT * (rate - known)

    def _name(self, tier: str) -> str:
        return self._names.get(tier, tier)


def speed_name(tier: str, *, place: str, codec: Codec, sealing: Sealing) -> str:
    """What a tier's bandwidth is remembered under. ``place`` is without credentials."""
    return f"load {tier} {codec.name}{' sealed' if sealing.encrypts else ''} {place}"
