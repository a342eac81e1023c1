"""Finds the files to ingest, and reads their texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlinker.prompting.documents import read_document


@dataclass(frozen=True, slots=True)
class File:
    """A file that was read."""

    path: Path
    """Absolute, so that runs from different folders mean the same file."""

    content: bytes

    @property
    def digest(self) -> str:
        """The SHA-256 (hex) of the content."""
        return hashlib.sha256(self.content).hexdigest()

    def text(self) -> str:
        """Return the text; of PDF, HTML, DOCX and EPUB, it is Markdown.

        Raises NoTextError, and MissingLibraryError if the format's converter is not installed.
        """
        return read_document(self.content, self.path.suffix).text


def named_from_root(path: Path) -> Path:
    """Return the absolute path of an existing file or folder, without ``..``: what leads to the
    last one is resolved, and links behind it keep their names."""
    parts = path.absolute().parts
    behind = next((place for place in range(len(parts), 0, -1) if parts[place - 1] == ".."), 0)
    return Path(*parts[:behind]).resolve().joinpath(*parts[behind:]) if behind else Path(*parts)


def find_files(paths: Sequence[Path], glob: str) -> Iterator[Path]:
    """Yield the files among ``paths``, which are absolute, and those in folders that match
    ``glob``, each once; hidden ones in folders are left out. Raises ValueError or
    NotImplementedError for a pattern that is none."""
    found: dict[Path, None] = {}
    for start in paths:
        if start.is_file():
            found[start] = None
            continue
        for file in sorted(start.rglob(glob)):
            hidden = any(part.startswith(".") for part in file.relative_to(start).parts)
            if file.is_file() and not hidden:
                found[file] = None
    yield from found
