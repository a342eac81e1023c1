"""Speeds of this machine, as measured, by name: in memory, and in a file that the next process begins with."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from kvlinker.store.format.chunk_file import open_regular
from kvlinker.store.format.header import ChunkFileError

logger = logging.getLogger(__name__)

FILE_NAME = "speeds.json"
FORMAT = "kvlinker-speeds"
FORMAT_VERSION = 1

STALE_SECONDS = 7 * 86400.0
"""What was not measured for so long counts as not measured: the machine may have changed."""

DRIFT = 0.25
"""A measurement drifts where it is off by more than this share of what is known; ``DRIFT_NOTES`` in turn are
believed."""

DRIFT_NOTES = 3
SAVE_SECONDS = 10.0
"""From a change worth writing to the write, so that there are few."""

_MOST_BYTES = 1 << 20
_CHECKSUM = "xxh3_128"


@dataclass(frozen=True, slots=True)
class Measurement:
    """``values`` are not negative, and not all zero; ``at`` is when they were measured, in Unix seconds."""

    values: tuple[float, ...]
    at: float

    @property
    def stale(self) -> bool:
        return abs(time.time() - self.at) > STALE_SECONDS

    def drifted_from(self, other: Measurement | None) -> bool:
        return other is None or any(
            abs(value - before) > DRIFT * before for value, before in zip(self.values, other.values, strict=False)
        )


class Speeds:
    """What a name means is its user's to say: bytes per second of a tier, seconds per token of a model. A file that is
    missing, damaged or not ours holds nothing; a newer version's is left alone.

    All methods may be called from any thread, and none raises because of the file.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Begin with what the file at ``path`` says; without one, nothing is kept."""
        self._path = path
        self._complained = False
        self._lock = threading.Lock()
        self._file_lock = threading.Lock()
        self._saved = self._read()
        self._measured = dict(self._saved)
        self._notes: dict[str, int] = {}  # since the last save
        self._saving: threading.Timer | None = None

    def of(self, name: str) -> tuple[float, ...] | None:
        """None where nothing was measured for a long time."""
        measured = self._measured.get(name)
        return None if measured is None or measured.stale else measured.values

    def note(self, name: str, values: Sequence[float]) -> None:
        """This is the speed now. It is written soon if it is new, or has drifted from what was written. Raises
        ValueError for values that are no speeds."""
        if not _valid(values):
            raise ValueError(f"{name}: {values} are no speeds")
        with self._lock:
            measured = self._measured[name] = Measurement(tuple(values), time.time())
            self._notes[name] = self._notes.get(name, 0) + 1
            saved = self._saved.get(name)
            due = saved is None or (self._notes[name] >= DRIFT_NOTES and measured.drifted_from(saved))
            if due and self._saving is None and self._path is not None:
                self._saving = threading.Timer(SAVE_SECONDS, self.save)
                self._saving.daemon = True
                self._saving.start()

    def save(self) -> bool:
        """Write what was measured, with what others wrote meanwhile; whether the file has it now."""
        with self._file_lock:
            with self._lock:
                self._cancel()
                measured = dict(self._measured)
            for name, theirs in self._read().items():
                if name not in measured or measured[name].at < theirs.at:
                    measured[name] = theirs
            if not self._write(measured):
                return False
            with self._lock:
                self._saved = measured
                for name, one in measured.items():
                    if name not in self._measured or self._measured[name].at < one.at:
                        self._measured[name] = one
                self._notes.clear()
            return True

    def close(self) -> None:
        """Save what has changed. Idempotent."""
        with self._lock:
            self._cancel()
            changed = bool(self._notes)
        if changed:
            self.save()

    def _cancel(self) -> None:
        """What was to be written soon is written now, or never; the lock is held."""
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
                return _measurements(content)
        except FileNotFoundError:
            return {}
        except (OSError, ChunkFileError, ValueError, RecursionError) as error:
            self._complain(f"Measured speeds in {self._path} cannot be read, and are measured again: {error}")
            return {}
        version = content.get("version")
        self._complain(f"{self._path} is of version {version}, not {FORMAT_VERSION}: it is not used, and left alone.")
        self._path = None
        return {}

    def _write(self, measured: Mapping[str, Measurement]) -> bool:
        """Beside its place, and renamed, so that no reader sees half of it."""
        if self._path is None:
            return False
        speeds = {name: {"values": one.values, "measured_at": one.at} for name, one in sorted(measured.items())}
        content = {"format": FORMAT, "version": FORMAT_VERSION, "speeds": speeds, _CHECKSUM: _checksum(speeds)}
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, self._path)
        except OSError as error:
            self._complain(f"Measured speeds are not kept in {self._path}: {error}")
            with suppress(OSError):
                temporary.unlink()
            return False
        return True

    def _complain(self, message: str) -> None:
        """Once."""
        if not self._complained:
            self._complained = True
            logger.warning("%s", message)


def _measurements(content: Mapping[str, Any]) -> dict[str, Measurement]:
    """Those that are not stale. Raises ValueError for content that was not written so."""
    speeds = content.get("speeds")
    if not isinstance(speeds, dict) or content.get(_CHECKSUM) != _checksum(speeds):
        raise ValueError("it does not match its checksum")
    found = {name: _measurement(entry) for name, entry in speeds.items()}
    return {name: measured for name, measured in found.items() if not measured.stale}


def _measurement(entry: Any) -> Measurement:
    if isinstance(entry, dict):
        values, at = entry.get("values"), entry.get("measured_at")
        if isinstance(values, list) and _valid(values) and isinstance(at, int | float) and math.isfinite(at):
            return Measurement(tuple(map(float, values)), float(at))
    raise ValueError(f"{entry!r} is no measurement")


def _checksum(speeds: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(speeds, sort_keys=True).encode())


def _valid(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and 0 <= value < math.inf for value in values) and any(values)
