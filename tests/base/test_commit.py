"""A release knows its commit from its archive, and a clone from git; other clones do not count."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from kvlinker.base import commit as commit_module
from kvlinker.base.commit import commit

PLACE = Path(commit_module.__file__)


def said_by(folder: Path) -> str:
    """What a copy of the module says in ``folder``."""
    code = "import commit; print(commit.commit())"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_clone_asks_git() -> None:
    assert re.fullmatch(r"[0-9a-f]{7,}|unknown", commit())


def test_an_archive_has_it_written_in(tmp_path: Path) -> None:
    text = PLACE.read_text(encoding="utf-8")
    (tmp_path / "commit.py").write_text(text.replace("$Format:%h$", "1234abc"), encoding="utf-8")
    assert said_by(tmp_path) == "1234abc"


def test_another_clone_around_it_is_not_asked(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    shutil.copy(PLACE, tmp_path / "commit.py")
    assert said_by(tmp_path) == "unknown"
