"""The documentation lists every limit of a request, with its value."""

from __future__ import annotations

from pathlib import Path

from kvlinker.base.types import limits

API = Path(__file__).parents[3] / "docs" / "api.md"
LIMITS = {name: value for name, value in vars(limits).items() if name.isupper()}


def test_the_documentation_has_every_limit() -> None:
    section = API.read_text().partition("### Limits\n")[2].partition("\n## ")[0]
    assert len(LIMITS) > 20
    assert [name for name, value in LIMITS.items() if f"{value:,}" not in section] == []
