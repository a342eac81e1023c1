"""The laboratory's pages name all that there is, and their links lead to files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from kvlinker_lab.cli import LabGroup, app
from kvlinker_lab.figures.figure import known_figures

LAB = Path(__file__).parents[1]
SUMMARY = LAB.parent / "docs" / "reproduction.md"
PAGES = [
    LAB / "README.md",
    *(LAB / "docs" / f"{name}.md" for name in ("reproduction", "benchmarks", "fleet")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(LAB).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [
        target for target in targets if "://" not in target and not (page.parent / target).exists()
    ]
    assert targets
    assert not missing


def test_the_introduction_lists_all_commands() -> None:
    listed = re.findall(r"^\| `kvlinker-lab ([\w-]+)", PAGES[0].read_text(), re.MULTILINE)
    group = get_command(app)
    assert isinstance(group, LabGroup)
    assert sorted(listed) == sorted(group.list_commands(typer.Context(group)))


def test_each_figure_is_in_the_summary_and_in_full(subtests: pytest.Subtests) -> None:
    summary, full = SUMMARY.read_text(), PAGES[1].read_text()
    for name in known_figures():
        with subtests.test(name):
            assert f"| [{name}](" in summary
            assert f"](reproduction/{name}.png)" in summary
            assert f"`kvlinker-lab figure {name}" in full
            assert f"](../../docs/reproduction/{name}.png)" in full
            assert (PAGES[1].with_suffix("") / f"{name}.json").is_file()
