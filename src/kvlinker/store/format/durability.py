"""Writes files so that readers, and a power cut, find the old content or the new one, whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

TEMPORARY_SUFFIX = ".tmp"
"""Ends the names of files that are still being written; a crash may leave them behind."""


def synchronize(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's names. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_beside(path: Path, write: Callable[[BinaryIO], object]) -> Path:
    """Write a temporary file in the folder of ``path``, which exists, and wait until the disk has
    its content.

    Returns its path, for the caller to rename it. Only its owner may read it. On an error nothing
    stays behind; raises OSError, and what ``write`` raises.
    """
    descriptor, name = tempfile.mkstemp(
        prefix=f"{path.stem}.", suffix=TEMPORARY_SUFFIX, dir=path.parent
    )
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    return temporary


def replace_file(path: Path, content: bytes) -> None:
    """Make ``path`` a file of this content, in place of one that may be there. Raises OSError."""
    temporary = write_beside(path, lambda file: file.write(content))
    try:
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    synchronize(path.parent)


def create_file(path: Path, content: bytes) -> bool:
    """Make ``path`` a file of this content; returns False if another was there already, and stays.
    Raises OSError."""
    temporary = write_beside(path, lambda file: file.write(content))
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    synchronize(path.parent)
    return True
