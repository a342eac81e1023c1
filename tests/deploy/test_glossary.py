"""The glossary names classes where they are, and the pages on architecture files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("architecture.md", "kernels.md", "states.md")
NAMED = [
    name
    for page in PAGES
    for name in re.findall(r"`([\w/.-]+(?:\.py|\.cpp|/))`", (ROOT / "docs" / page).read_text())
]
PLACES = re.findall(r"`(\w+)` in `([\w/.]+)`", (ROOT / "docs" / "glossary.md").read_text())

FOLDERS = (ROOT / "src" / "kvlinker", *(ROOT / "integrations").glob("kvlinker-*"))


def test_it_has_the_nouns() -> None:
    assert len(PLACES) >= 35


def test_terms_are_defined_where_it_says(subtests: pytest.Subtests) -> None:
    for name, file in PLACES:
        with subtests.test(name, file=file):
            (place,) = (folder / file for folder in FOLDERS if (folder / file).is_file())
            code = place.read_text()
            assert re.search(rf"^(class {name}\b|{name}(: TypeAlias)? = )", code, re.MULTILINE)


def test_architecture_names_what_exists() -> None:
    """Files and folders are named from any of their own folders on."""
    found = {each.relative_to(ROOT) for each in (ROOT / "src").rglob("*")}
    paths = {f"/{each.as_posix()}{'' if each.suffix else '/'}" for each in found}
    assert len(NAMED) >= 60
    assert [name for name in NAMED if not any(each.endswith(f"/{name}") for each in paths)] == []
