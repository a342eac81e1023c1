"""Measured speeds of this machine by name, kept in memory and in a file, so that the next process begins with them."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlinker.store.format.chunk_file import open_regular
from kvlinker.store.format.durability import replace_file
from kvlinker.store.format.header import ChunkFileError

logger = logging.getLogger(__name__)

FILE_NAME = "speeds.json"
FORMAT = "kvlinker-speeds"
FORMAT_VERSION = 1

STALE_SECONDS = 7 * 86400.0
"""The seconds after which a measurement is ignored, since the machine may have changed."""

DRIFT = 0.25
"""The share of the known value by which a measurement must differ to count as drifted."""

SAVE_SECONDS = 10.0
"""The seconds from a change worth saving to the write, so that writes are few."""

_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measured ``values``, not negative and not all zero; ``at`` is the time of measurement in Unix seconds."""

    values: tuple[float, ...]
    at: float

    @property
    def stale(self) -> bool:
        """True if the measurement is older than ``STALE_SECONDS``."""
        return abs(time.time() - self.at) > STALE_SECONDS

    def drifted_from(self, other: Measurement | None) -> bool:
        """Return whether there is no ``other``, or it differs so much that this one is worth writing."""
        return other is None or any(
            abs(value - before) > DRIFT * before for value, before in zip(self.values, other.values, strict=False)
        )


class Speeds:
    """Keeps measurements under names; their users define the values, such as bytes per second of a tier or seconds per
    token of a model. A file that is missing, damaged or foreign counts as empty; a newer version's is left alone.

    Any thread may call the methods, and none raises because of the file.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Read the measurements in the file at ``path``; without a path, nothing is saved."""
        self._path = path
        self._complained = False
        self._lock = threading.Lock()
        self._file_lock = threading.Lock()
        self._saved = self._read()
        self._measured = dict(self._saved)
        self._changed = False
        self._saving: threading.Timer | None = None

    def of(self, name: str) -> tuple[float, ...] | None:
        """Return the values under the name; None where they were not measured, or too long ago."""
        measured = self._measured.get(name)
        return None if measured is None or measured.stale else measured.values

    def note(self, name: str, values: Sequence[float]) -> None:
        """Record these values as the current ones. They are saved soon if they are new, or have drifted from what was
        saved. Raises ValueError for values that are negative, not finite or all zero."""
        if not _valid(values):
            raise ValueError(f"{name}: {values} are no speeds")
        with self._lock:
            measured = self._measured[name] = Measurement(tuple(values), time.time())
            self._changed = True
            if self._path is not None and self._saving is None and measured.drifted_from(self._saved.get(name)):
                self._saving = threading.Timer(SAVE_SECONDS, self.save)
                self._saving.daemon = True
                self._saving.start()

    def save(self) -> bool:
        """Write what was measured, and the newer of what others wrote meanwhile; return whether the file has it now."""
        with self._file_lock:
            with self._lock:
                self._cancel()
                self._changed = False
                measured = dict(self._measured)
            for name, theirs in self._read().items():
                if name not in measured or measured[name].at < theirs.at:
                    measured[name] = theirs
            if not self._write(measured):
                self._changed = True
                return False
            with self._lock:
                self._saved = measured
                for name, one in measured.items():
                    if name not in self._measured or self._measured[name].at < one.at:
                        self._measured[name] = one
            return True

    def close(self) -> None:
        """Save what has changed. Idempotent."""
        with self._lock:
            self._cancel()
            changed = self._changed
        if changed:
            self.save()

    def _cancel(self) -> None:
        """Write now, or never, what was to be written soon; the lock is held."""
        if self._saving is not None:
            self._saving.cancel()
            self._saving = None

    def _read(self) -> dict[str, Measurement]:
        if self._path is None:
            return {}
        try:
            with open_regular(self._path) as file:
                content = json.loads(file.read(_MOST_BYTES))
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise ValueError("it holds something else")
            if content.get("version") == FORMAT_VERSION:
                found = {name: _measurement(entry) for name, entry in content["speeds"].items()}
                return {name: measured for name, measured in found.items() if not measured.stale}
        except FileNotFoundError:
            return {}
        except (OSError, ChunkFileError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._complain(f"Measured speeds in {self._path} cannot be read, and are measured again: {error!r}")
            return {}
        version = content.get("version")
        self._complain(f"{self._path} is of version {version}, not {FORMAT_VERSION}: it is not used, and left alone.")
        self._path = None
        return {}

    def _write(self, measured: dict[str, Measurement]) -> bool:
        if self._path is None:
            return False
        speeds = {name: {"values": one.values, "measured_at": one.at} for name, one in sorted(measured.items())}
        content = {"format": FORMAT, "version": FORMAT_VERSION, "speeds": speeds}
        try:
            replace_file(self._path, json.dumps(content, indent=1).encode() + b"\n")
        except OSError as error:
            self._complain(f"Measured speeds are not kept in {self._path}: {error}")
            return False
        return True

    def _complain(self, message: str) -> None:
        """Log a warning, but only once."""
        if not self._complained:
            self._complained = True
            logger.warning("%s", message)


def _measurement(entry: dict[str, Any]) -> Measurement:
    values, at = entry["values"], float(entry["measured_at"])
    if not _valid(values) or not math.isfinite(at):
        raise ValueError(f"{entry!r} is no measurement")
    return Measurement(tuple(map(float, values)), at)


def _valid(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and 0 <= value < math.inf for value in values) and any(values)
