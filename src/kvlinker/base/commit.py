"""The commit that this code is of."""

from __future__ import annotations

import subprocess
from pathlib import Path

_ARCHIVED = "$Format:%h$"
"""The commit, which ``git archive`` puts here for releases. In a working tree it is a pattern."""


def commit() -> str:
    """Return the short name of the commit of this code; ``unknown`` outside releases and clones."""
    if not _ARCHIVED.startswith("$"):
        return _ARCHIVED
    place = Path(__file__)
    try:
        _git(place.parent, "ls-files", "--error-unmatch", place.name)  # it may be another's clone
        return _git(place.parent, "rev-parse", "--short", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(folder: Path, *command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()
