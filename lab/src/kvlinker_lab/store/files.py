"""Plain copies and reads of chunk files, to compare a tier's with."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

READ_BYTES = 8 << 20
"""The bytes of one read."""


def total_bytes(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def read_seconds(files: Sequence[Path]) -> float:
    """Return the seconds of reading the files one after the other, into memory that was touched
    before."""
    buffer = np.zeros(READ_BYTES, dtype=np.uint8)
    begin = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer.data):
                pass
    return time.perf_counter() - begin


def copy_seconds(files: Sequence[Path], folder: Path) -> float:
    """Return the seconds of copying the files into a folder, each synchronised, as stored chunks
    are. The copies are removed."""
    begin = time.perf_counter()
    copies = [folder / file.name for file in files]
    for file, copy in zip(files, copies, strict=True):
        shutil.copyfile(file, copy)
        with copy.open("rb+") as opened:
            os.fsync(opened.fileno())
    seconds = time.perf_counter() - begin
    for copy in copies:
        copy.unlink()
    return seconds
