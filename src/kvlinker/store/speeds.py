"""Keeps measured speeds of this machine by name, in memory and in a file, so that the next process
begins with them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from kvlinker.store.format.chunk_file import open_regular
from kvlinker.store.format.durability import replace_file
from kvlinker.store.format.header import ChunkFileError

logger = logging.getLogger(__name__)

FILE_NAME = "speeds.json"
FORMAT_VERSION = 1
"""The version of the file. A change of its format takes the next number."""

STALE_SECONDS = 7 * 86400.0
"""The seconds after which a measurement is ignored, since the machine may have changed; chosen by
hand."""

DRIFT = 0.25
"""The share of the known value by which a measurement must differ to count as drifted; chosen by
hand."""

SAVE_SECONDS = 10.0
"""The seconds from a change worth saving to the write, so that writes are few; chosen by hand."""

_MOST_BYTES = 1 << 20
"""The bytes of the file that are read at most; chosen by hand."""


def _checked(values: tuple[float, ...]) -> tuple[float, ...]:
    if not all(0 <= value < math.inf for value in values) or not any(values):
        raise ValueError(f"{values} are no speeds")
    return values


class Measurement(BaseModel):
    """Measured ``values``, not negative and not all zero; ``measured_at`` is in Unix seconds."""

    model_config = ConfigDict(frozen=True)

    values: Annotated[tuple[float, ...], AfterValidator(_checked)]
    measured_at: float = Field(allow_inf_nan=False)

    @property
    def stale(self) -> bool:
        """True if the measurement is older than ``STALE_SECONDS``."""
        return abs(time.time() - self.measured_at) > STALE_SECONDS

    def drifted_from(self, other: Measurement | None) -> bool:
        """Return whether this measurement is worth writing: there is no ``other``, or the two
        differ clearly."""
        return other is None or any(
            abs(value - before) > DRIFT * before
            for value, before in zip(self.values, other.values, strict=False)
        )


class _Version(BaseModel):
    """The beginning of the file of any version."""

    format: Literal["kvlinker-speeds"] = "kvlinker-speeds"
    version: int = FORMAT_VERSION


class _File(_Version):
    """The file of this version."""

    speeds: dict[str, Measurement]


class Speeds:
    """Keeps measurements under names; their users define the values, such as bytes per second of a
    tier or seconds per token of a model. A file that is missing, damaged or foreign counts as
    empty; a newer version's is left alone.

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
        self._saving: threading.Timer | None = None

    def of(self, name: str) -> tuple[float, ...] | None:
        """Return the values under the name; None if they were not measured, or too long ago."""
        measured = self._measured.get(name)
        if measured is None or abs(time.time() - measured.measured_at) > STALE_SECONDS:
            return None
        return measured.values

    def note(self, name: str, values: Sequence[float]) -> None:
        """Record these values as the current ones. They are saved soon if they are new, or have
        drifted from what was saved. Raises ValueError for values that are negative, not finite or
        all zero."""
        measured = Measurement(values=tuple(values), measured_at=time.time())
        with self._lock:
            self._measured[name] = measured
            if (
                self._path is not None
                and self._saving is None
                and measured.drifted_from(self._saved.get(name))
            ):
                self._saving = threading.Timer(SAVE_SECONDS, self.save)
                self._saving.daemon = True
                self._saving.start()

    def save(self) -> bool:
        """Write what was measured, and the newer of what others wrote meanwhile; return whether the
        file has it now."""
        with self._file_lock:
            with self._lock:
                self._cancel()
            theirs = self._read()
            with self._lock:
                both = sorted(
                    [*theirs.items(), *self._measured.items()], key=lambda item: item[1].measured_at
                )
                self._measured = dict(both)  # the newest of each name
                measured = dict(both)
            if not self._write(measured):
                return False
            with self._lock:
                self._saved = measured
            return True

    def close(self) -> None:
        """Save what has changed. Idempotent."""
        with self._lock:
            self._cancel()
            changed = self._measured != self._saved
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
                content = file.read(_MOST_BYTES)
            version = _Version.model_validate_json(content).version
            if version == FORMAT_VERSION:
                found = _File.model_validate_json(content).speeds
                return {name: measured for name, measured in found.items() if not measured.stale}
        except FileNotFoundError:
            return {}
        except (OSError, ChunkFileError, ValueError) as error:
            self._complain(
                f"Measured speeds in {self._path} cannot be read, and are measured again: {error!r}"
            )
            return {}
        self._complain(
            f"{self._path} is of version {version}, not {FORMAT_VERSION}: it is not used, and left"
            " alone."
        )
        self._path = None
        return {}

    def _write(self, measured: dict[str, Measurement]) -> bool:
        if self._path is None:
            return False
        try:
            replace_file(
                self._path, _File(speeds=measured).model_dump_json(indent=1).encode() + b"\n"
            )
        except OSError as error:
            self._complain(f"Measured speeds are not kept in {self._path}: {error}")
            return False
        return True

    def _complain(self, message: str) -> None:
        """Log a warning, but only once."""
        if not self._complained:
            self._complained = True
            logger.warning("%s", message)
