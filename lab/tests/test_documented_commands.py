"""The laboratory takes every command line of its own that the documentation shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from kvlinker.cli.lazy import LazyGroup
from kvlinker_lab.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "lab/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "lab" / "docs").glob("*.md")),
]
SHOWN = re.compile(r"^\$ kvlinker-lab (.+)$|`kvlinker-lab ([^`]+)`", re.MULTILINE)


@pytest.mark.whole
def test_documented_commands_are_taken(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments are read, and nothing is measured."""
    monkeypatch.chdir(ROOT)
    group = typer.main.get_command(app)
    assert isinstance(group, LazyGroup)
    shown = {
        tuple(shlex.split(line[1] or line[2], comments=True))
        for page in PAGES
        for line in SHOWN.finditer(page.read_text())
    }
    assert {"load", "certify", "advise"} <= {name for name, *_ in shown}
    for name, *arguments in sorted(shown):
        if name == "--help":
            continue
        with subtests.test(" ".join((name, *arguments))):
            context = typer.Context(group)
            lazy = name in group.summaries()
            command = group.load(name) if lazy else group.get_command(context, name)
            assert command is not None
            if arguments:  # a bare name may be a mention
                command.make_context(name, arguments)
