"""Text files under paths, for kvlinker ingest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path


def find_files(paths: Sequence[Path], glob: str) -> Iterator[Path]:
    """The files among ``paths``, and those in folders that match ``glob``; hidden ones in folders are left out."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_file():
            found[path] = None
            continue
        for file in sorted(path.rglob(glob)):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and not hidden:
                found[file] = None
    yield from found


def read_text(path: Path) -> str | None:
    """The file's text, or None for one that is binary or not in UTF-8. Raises OSError."""
    content = path.read_bytes()
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
