"""Chunk files as the operating system sees them, with the page cache warm or cold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvlinker.base.errors import InvalidRequestError


def chunk_files(folder: Path) -> list[Path]:
    """All chunk files below a state directory."""
    return sorted(folder.rglob("*.safetensors"))


def check_cold_reads() -> None:
    """Raise InvalidRequestError if the page cache cannot be emptied of files."""
    if not hasattr(os, "posix_fadvise"):
        raise InvalidRequestError(
            "This system has no posix_fadvise, which cold reads need: run it on Linux."
        )


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """Have the next read of synchronised files come from the disk."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
