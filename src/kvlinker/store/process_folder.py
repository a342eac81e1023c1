"""Makes folders that belong to one process each, and are removed with it: the next process removes
those of a killed one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class ProcessFolder:
    """Keeps a folder for this process alone. It is locked as long as the process lives; the kernel
    unlocks it then."""

    def __init__(self, root: Path) -> None:
        """Make a folder in ``root``, which is made where it is missing. Raises OSError."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(root):
            self.path = Path(tempfile.mkdtemp(dir=root))
            self._descriptor: int | None = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the folder with all that is in it. Idempotent."""
        if self._descriptor is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = None


def remove_left(root: Path) -> None:
    """Remove the folders in ``root`` whose processes have ended; do nothing if there is no such
    folder. Raises nothing."""
    with suppress(OSError), _locked(root):
        for folder in root.iterdir():
            with suppress(OSError), _locked(folder, wait=False):
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Lock the folder for the time of the block. Raises OSError if it is missing, or locked and not
    waited for."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)
