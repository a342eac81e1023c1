"""What has to be done so that a power cut undoes nothing."""

from __future__ import annotations

import os
from pathlib import Path


def synchronize(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's names. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
