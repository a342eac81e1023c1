"""How fast each tier delivers, as measured while it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from kvlinker.store.format.codecs import Codec
from kvlinker.store.format.encryption import Sealing
from kvlinker.store.loading.speeds import DRIFT, DRIFT_NOTES, Speeds

_WEIGHT = 0.3
"""Of a new measurement, beside all earlier ones."""

BUSY_SHARE = 0.15
"""Of the time that reading takes. When a thread that reads is busy for longer and takes its processor from a
computation, the computation loses about three times as much (its other threads wait for the one that was held up), and
there are two that read: then it is quicker to read first."""

FRESH_SECONDS = 60.0
"""A measurement older than this decides nothing any more: the tier may have changed."""


@dataclass(frozen=True, slots=True)
class LoadTime:
    """``seconds`` of reading, in ``busy`` of which a processor works rather than waits."""

    seconds: float = 0.0
    busy: float = 0.0

    def __add__(self, other: LoadTime) -> LoadTime:
        return LoadTime(self.seconds + other.seconds, self.busy + other.busy)

    @property
    def waits(self) -> bool:
        """Computation on the same processors can go on beside it."""
        return self.busy <= BUSY_SHARE * self.seconds


class Bandwidths:
    """Bytes per second by tier: a moving average, which begins anew where it drifts from what is measured now; and the
    share of the time that reading keeps a processor busy. Methods may be called from any thread."""

    def __init__(self, speeds: Speeds | None = None, names: Mapping[str, str] | None = None) -> None:
        """``speeds`` keeps what is measured, under the tiers' ``names`` (by tier; the tier itself, where there is
        none)."""
        self._speeds = speeds or Speeds()
        self._names = dict(names or {})
        self._lock = threading.Lock()
        self._measured_at: dict[str, float] = {}
        self._drifting: dict[str, list[float]] = {}  # the last rates, while they are off

    def note(self, tier: str, nbytes: int, seconds: float, busy_seconds: float = 0.0) -> None:
        """A tier delivered ``nbytes`` in ``seconds``, in some of which a processor was busy."""
        if nbytes <= 0 or seconds <= 0:
            return
        with self._lock:
            rate, busy = speed_values(nbytes, LoadTime(seconds, busy_seconds))
            before = self._values(tier)
            if before is not None:
                busy = before[1] + _WEIGHT * (busy - before[1])
            self._speeds.note(self._name(tier), [self._averaged(tier, rate), busy])
            self._measured_at[tier] = time.monotonic()

    def of(self, tier: str) -> float | None:
        """None where nothing has been measured, or not for a long time."""
        values = self._values(tier)
        return None if values is None else values[0]

    def time(self, tier: str, nbytes: int) -> LoadTime | None:
        """What reading ``nbytes`` is expected to take; None where nothing has been measured."""
        values = self._values(tier)
        if values is None or not values[0]:
            return None
        return LoadTime(nbytes / values[0], nbytes / values[0] * values[1])

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

    def _values(self, tier: str) -> tuple[float, ...] | None:
        """Bytes per second, and the busy share."""
        values = self._speeds.of(self._name(tier))
        return values if values is not None and len(values) == 2 else None

    def _name(self, tier: str) -> str:
        return self._names.get(tier, tier)


def speed_values(nbytes: int, taken: LoadTime) -> tuple[float, float]:
    """What is remembered of ``nbytes`` that took this time: bytes per second, and the busy share."""
    return nbytes / taken.seconds, min(1.0, max(0.0, taken.busy / taken.seconds))


def speed_name(tier: str, *, place: str, codec: Codec, sealing: Sealing) -> str:
    """What a tier's bandwidth is remembered under. ``place`` is without credentials."""
    return f"load {tier} {codec.name}{' sealed' if sealing.encrypts else ''} {place}"
