"""The glossary names classes where they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = re.findall(r"`(\w+)` in `([\w/.]+)`", (ROOT / "docs" / "glossary.md").read_text())


def test_it_has_the_nouns() -> None:
    assert len(PLACES) >= 35


@pytest.mark.parametrize(("name", "file"), PLACES)
def test_terms_are_defined_where_it_says(name: str, file: str) -> None:
    code = (ROOT / "src" / "kvlinker" / file).read_text()
    assert re.search(rf"^(class {name}\b|{name}(: TypeAlias)? = )", code, re.MULTILINE)
