"""Every figure: measured on a few examples, drawn, told, and written to a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlinker.config import load_settings
from kvlinker.research.figures.figure import find_figure, known_figures
from kvlinker.research.figures.lab import Lab
from kvlinker.research.figures.page import write_figure

EXAMPLES = 2  # of different kinds, so that findings tell kinds apart


@pytest.mark.slow
@pytest.mark.parametrize("name", known_figures())
def test_figures_are_measured_drawn_and_told(name: str, tmp_path: Path) -> None:
    lab = Lab(load_settings(), f"kvlinker bench figure {name}", limit=EXAMPLES, shape="tiny")
    figure = find_figure(name)
    rows = figure.measure(lab)
    assert rows == json.loads(json.dumps(rows))
    page = tmp_path / "page.md"
    write_figure(page, figure, lab.report(rows, figure.shape), list(known_figures()))
    text = page.read_text()
    assert figure.finding(rows) in text
    assert f"kvlinker bench figure {name}" in text
    assert (tmp_path / "page" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for row in figure.printed(rows):
        assert set(figure.columns) <= set(row)
