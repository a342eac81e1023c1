"""Measures each tier's bandwidth while loading, and forecasts loading times from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from kvlinker.store.format.codecs import Codec
from kvlinker.store.format.sealing import Sealing
from kvlinker.store.speeds import DRIFT, Speeds

_WEIGHT = 0.3
"""The weight of a new measurement in the moving average (0 to 1); chosen by hand."""

BUSY_SHARE = 0.15
"""The share of its time up to which a thread that reads leaves its processor to a computation;
chosen by hand. When it is busy for longer, the computation loses about three times as much (its
other threads wait for the one that was held up), and there are two that read: then it is quicker to
read first."""

DRIFT_NOTES = 3
"""The number of measurements in a row that drift from the average before they replace it; chosen by
hand."""

FRESH_SECONDS = 60.0
"""The seconds after which a measurement no longer decides against a tier, which may have changed;
chosen by hand."""


@dataclass(frozen=True, slots=True)
class LoadTime:
    """``seconds`` of reading, in ``busy`` of which a processor works rather than waits."""

    seconds: float = 0.0
    busy: float = 0.0

    def __add__(self, other: LoadTime) -> LoadTime:
        return LoadTime(self.seconds + other.seconds, self.busy + other.busy)

    @property
    def waits(self) -> bool:
        """True if a computation on the same processors can run during the reading."""
        return self.busy <= BUSY_SHARE * self.seconds


@dataclass(frozen=True, slots=True)
class TimedRead:
    """A read of ``nbytes`` by one thread: ``begin`` and ``end`` in seconds on the performance
    counter, and the ``busy`` seconds of the thread."""

    begin: float
    end: float
    busy: float
    nbytes: int

    @property
    def seconds(self) -> float:
        """The seconds that it took."""
        return self.end - self.begin


class Bandwidths:
    """Bytes per second by tier, as a moving average that restarts when it drifts from new
    measurements, and the share of the time for which reading keeps a processor busy. Any thread may
    call the methods."""

    def __init__(
        self, speeds: Speeds | None = None, names: Mapping[str, str] | None = None
    ) -> None:
        """Keep measurements in ``speeds``, under the tiers' ``names``; a tier without one uses its
        own name."""
        self._speeds = speeds or Speeds()
        self._names = dict(names or {})
        self._lock = threading.Lock()
        self._measured_at: dict[str, float] = {}
        self._drifting: dict[str, list[float]] = {}  # the last rates, while they are off

    def note(self, tier: str, nbytes: int, seconds: float, busy_seconds: float = 0.0) -> None:
        """Record that a tier delivered ``nbytes`` in ``seconds``, during ``busy_seconds`` of which
        a processor was busy."""
        if nbytes <= 0 or seconds <= 0:
            return
        with self._lock:
            busy = min(1.0, max(0.0, busy_seconds / seconds))
            before = self._values(tier)
            if before is not None:
                busy = before[1] + _WEIGHT * (busy - before[1])
            self._speeds.note(self._name(tier), [self._average(tier, nbytes / seconds), busy])
            self._measured_at[tier] = time.monotonic()

    def note_reads(self, tier: str, reads: Sequence[TimedRead]) -> None:
        """Record the reads of several threads: their bytes arrived during the time in which at
        least one of them was reading."""
        seconds, reached = 0.0, float("-inf")
        for read in sorted(reads, key=lambda read: read.begin):
            seconds += max(0.0, read.end - max(read.begin, reached))
            reached = max(reached, read.end)
        busy_share = sum(read.busy for read in reads) / (sum(read.seconds for read in reads) or 1.0)
        self.note(tier, sum(read.nbytes for read in reads), seconds, busy_share * seconds)

    def of(self, tier: str) -> float | None:
        """Return the tier's bytes per second; None if nothing was measured, or too long ago."""
        values = self._values(tier)
        return None if values is None else values[0]

    def time(self, reads: Iterable[tuple[str, int]]) -> LoadTime | None:
        """Return the predicted time of ``reads``, pairs of a tier and a number of bytes; None if a
        tier has not been measured."""
        taken = LoadTime()
        for tier, nbytes in reads:
            values = self._values(tier)
            if values is None or not values[0]:
                return None
            taken += LoadTime(nbytes / values[0], nbytes / values[0] * values[1])
        return taken

    def known(self) -> dict[str, float]:
        """Return the measured bytes per second of all tiers, by tier."""
        return {tier: rate for tier in self._names if (rate := self.of(tier)) is not None}

    def worth_loading(self, tier: str, nbytes: int, prefill_seconds: float) -> bool:
        """Return whether reading is expected to take no longer than computing; True if that is not
        known, or was not measured lately."""
        rate = self.of(tier)
        return rate is None or not self.fresh(tier) or nbytes / rate <= max(prefill_seconds, 1e-3)

    def fresh(self, tier: str) -> bool:
        """Return whether the last measurement is recent enough to decide against the tier."""
        return time.monotonic() - self._measured_at.get(tier, float("-inf")) < FRESH_SECONDS

    def _average(self, tier: str, rate: float) -> float:
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
        """Return the bytes per second and the busy share."""
        values = self._speeds.of(self._name(tier))
        return values if values is not None and len(values) == 2 else None

    def _name(self, tier: str) -> str:
        return self._names.get(tier, tier)


def speed_name(tier: str, *, place: str, codec: Codec, sealing: Sealing) -> str:
    """Return the name under which a tier's bandwidth is remembered. ``place`` is without
    credentials."""
    return f"load {tier} {codec.name}{' sealed' if sealing.encrypts else ''} {place}"
