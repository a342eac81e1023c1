"""Who uses a state directory: any number of processes at once, or one alone that changes what all depend on."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from kvlinker.store.errors import StoreError

PATIENCE_SECONDS = 10.0
_TRY_AGAIN_SECONDS = 0.02


class StateLock:
    """A lock on the file ``lock`` in a directory; it goes with the process, however that ends."""

    def __init__(self, directory: Path) -> None:
        """Open the file, create it where missing; nothing is locked yet. Raises StoreError."""
        self._directory = directory
        try:
            self._descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(error) from error

    def share(self) -> None:
        """Use the directory as others may at the same time. Raises StoreError where one has it alone for long."""
        self._lock(fcntl.LOCK_SH, PATIENCE_SECONDS, "is being encrypted anew, which takes a while. Wait for its end.")

    def take_alone(self, patience: float = 0.0) -> None:
        """Keep all others out. Raises StoreError where others use it for longer than ``patience`` seconds."""
        self._lock(
            fcntl.LOCK_EX, patience, "is in use by a server or another command. Stop it first: its key is to change."
        )

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _lock(self, kind: int, patience: float, refusal: str) -> None:
        deadline = time.monotonic() + patience
        while True:
            try:
                return fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise StoreError(f"The state directory {self._directory} {refusal}") from error
                time.sleep(_TRY_AGAIN_SECONDS)
            except OSError as error:
                raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> StoreError:
        return StoreError(
            f"The state directory {self._directory} cannot be locked: {error}. Choose another, on a local disk."
        )
