"""Locks a state directory, so that no process uses it while its key is changed."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kvlinker.base import system
from kvlinker.base.errors import StoreError

PATIENCE_SECONDS = 10.0
"""The seconds that a process waits for the lock to share it; chosen by hand."""

TRY_AGAIN_SECONDS = 0.02
"""The seconds between two attempts to acquire the lock; chosen by hand."""


class DirectoryLock:
    """File implementation of StateLock: locks the file ``lock`` of a state directory."""

    def __init__(self, directory: Path) -> None:
        """Open the file, create it where missing; nothing is locked yet. Raises StoreError."""
        self._directory = directory
        try:
            self._descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._unusable(error) from error

    def share(self) -> None:
        if not self._try_lock(PATIENCE_SECONDS, alone=False):
            raise rekeying_error(f"state directory {self._directory}")

    def take_alone(self, patience: float = 0.0) -> None:
        if not self._try_lock(patience, alone=True):
            raise in_use_error(f"state directory {self._directory}")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _try_lock(self, patience: float, *, alone: bool) -> bool:
        """Take the lock; return whether that was possible."""
        deadline = time.monotonic() + patience
        while True:
            try:
                system.lock(self._descriptor, alone=alone, wait=False)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(TRY_AGAIN_SECONDS)
            except OSError as error:
                raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> StoreError:
        return StoreError(
            f"The state directory {self._directory} cannot be locked: {error}. Choose another, on a"
            " local disk."
        )


def rekeying_error(what: str) -> StoreError:
    """Return the error of a process that cannot use a directory which another uses exclusively."""
    return StoreError(f"The {what} is being encrypted anew, which takes a while. Wait for its end.")


def in_use_error(what: str) -> StoreError:
    """Return the error of a process that cannot use a directory exclusively."""
    return StoreError(
        f"The {what} is in use by a server or another command. Stop it first: its catalog is to be"
        " written anew."
    )
