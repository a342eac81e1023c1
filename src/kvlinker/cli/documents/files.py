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


def find_files(paths: Sequence[Path], glob: str) -> Iterator[Path]:
    """Yield the absolute paths of the files among ``paths``, and of those in folders that match
    ``glob``, each once; hidden ones in folders are left out."""
    found: dict[Path, None] = {}
    for path in paths:
        start = path.absolute()
        if start.is_file():
            found[start] = None
            continue
        for file in sorted(start.rglob(glob)):
            hidden = any(part.startswith(".") for part in file.relative_to(start).parts)
            if file.is_file() and not hidden:
                found[file] = None
    yield from found
