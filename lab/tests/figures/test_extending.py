"""The laboratory's introduction: its figure is registered, found and measured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvlinker.base import registry
from kvlinker.settings import load_settings
from kvlinker_lab.figures import figure
from kvlinker_lab.figures.lab import Lab
from kvlinker_lab.figures.page import write_figure
from tests.quality.test_extending import PLUGIN, code_of

INTRODUCTION = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Installs the guide's figure as a module that an entry point names; the registry forgets it
    afterwards."""
    (tmp_path / f"{PLUGIN}.py").write_text(code_of("A figure of your own", "python", INTRODUCTION))
    monkeypatch.syspath_prepend(tmp_path)
    figure.known_figures()
    monkeypatch.setattr(figure._registry, "_values", dict(figure._registry._values))
    monkeypatch.setattr(figure._registry, "_loaded", False)
    entry = EntryPoint("passage-lengths", PLUGIN, "kvlinker.figures")
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [entry] if group == entry.group else []
    )
    yield
    sys.modules.pop(PLUGIN, None)


@pytest.mark.usefixtures("installed")
def test_a_figure_is_measured_and_shown(tmp_path: Path) -> None:
    found = figure.find_figure("passage-lengths")
    assert list(figure.known_figures())[-1] == found.name  # behind those of the papers
    lab = Lab(load_settings(), "kvlinker-lab figure passage-lengths", limit=3)
    rows = found.measure(lab)
    assert len(rows) == 3
    write_figure(tmp_path / "page.md", found, lab.report(rows), list(figure.known_figures()))
    assert "tokens on average." in (tmp_path / "page.md").read_text()
