"""What a machine can see of docstrings' words: the rules are in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(
    ROOT / place
    for place in (
        "src/kvlinker",
        "lab/src/kvlinker_lab",
        "integrations/kvlinker-fleet/kvlinker_fleet",
        "integrations/kvlinker-vllm/kvlinker_vllm",
    )
)

BEGINNINGS = re.compile(
    r"(?:Who|Whoever|What|Whatever|Is|Are|Has|Have|Of|Those|That|It|They|These)\b"
)
"""First words of docstrings that hide the actor or the verb."""

PHRASES = re.compile(
    r"\b(?:so many|so few|none but|nothing but|but for|whoever|gives? up|gave up|driv(?:e|es|en)"
    r" out|the first of them)\b",
    re.IGNORECASE,
)
"""Phrases that stand for a parameter, for an exception, or for a verb of the field."""


def docstrings(code: str) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and its functions, and those of its values."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str):
                yield " ".join(text.split())


def faults(code: str) -> list[str]:
    """Return the beginnings and phrases against the rules."""
    found = []
    for text in docstrings(code):
        if BEGINNINGS.match(text):
            found.append(text[:60])
        found += [match[0] for match in PHRASES.finditer(text)]
    return found


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ('"""Is the database."""', 1),
        ('"""Return whether ``nbytes`` bytes fit."""', 0),
        ('"""Evict so many\nbytes, but for pinned chunks."""', 2),
        ('x = 1\n"""Those that are left."""', 1),
        ('x = "Is no docstring"', 0),
    ],
)
def test_faults_are_found(code: str, count: int) -> None:
    assert len(faults(code)) == count


def test_docstrings_follow_the_rules(subtests: pytest.Subtests) -> None:
    for folder in PACKAGES:
        for file in folder.rglob("*.py"):
            if found := faults(file.read_text()):
                with subtests.test(str(file)):
                    pytest.fail(f"reword docstrings, see CONTRIBUTING.md: {found}")
