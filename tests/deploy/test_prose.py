"""What a machine can see of prose: its lines are short, and pages begin with what they are for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WIDTH = 100


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page that are no code, table, picture, comment or figure's part."""
    code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        line = re.sub(r"`[^`]*`", lambda span: span[0].replace(" ", "_"), line)
        if not code and not line.lstrip().startswith(("|", "![", "<", "```")):
            yield number, line


def test_lines_of_prose_are_short(subtests: pytest.Subtests) -> None:
    """Only what cannot be broken, such as a link or a command, is longer."""
    pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("lab/**/*.md")])
    for page in pages:
        with subtests.test(page.relative_to(ROOT).as_posix()):
            long = [f"{number}: {line}" for number, line in prose(page) if len(line) > WIDTH]
            assert [line for line in long if len(max(line.split(), key=len)) < WIDTH // 2] == []
