"""Every figure: measured on a few examples, drawn, told, and written to a page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvlinker.llm import LLM
from kvlinker.settings import Settings, load_settings
from kvlinker_lab.figures import serving
from kvlinker_lab.figures.figure import find_figure, known_figures
from kvlinker_lab.figures.lab import Lab
from kvlinker_lab.figures.page import write_figure
from kvlinker_lab.load.run import Competitor, LoadPlan, LoadReport, Start, run_load
from kvlinker_lab.load.servers import Server
from kvlinker_lab.serving import serve_llm

EXAMPLES = 2  # of different kinds, so that findings tell kinds apart


@pytest.fixture(autouse=True)
def light_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Serve in this process, for another takes seconds to start, and load it with short documents
    and answers."""

    @contextmanager
    def start(settings: Settings, **options: Any) -> Iterator[Server]:
        own = settings.model_copy(update={"state_dir": tmp_path / "state", **options})
        with LLM.from_settings(own) as llm, serve_llm(llm) as url:
            yield Server(url)

    def run_shortened(
        competitors: Sequence[Competitor], start: Start, plan: LoadPlan, **options: Any
    ) -> LoadReport:
        short = replace(plan.shape, chunk_tokens=32, output_tokens=(2, 3))
        return run_load(competitors, start, replace(plan, shape=short), **options)

    monkeypatch.setattr(serving, "kvlinker_server", start)
    monkeypatch.setattr(serving, "run_load", run_shortened)


@pytest.mark.whole
@pytest.mark.parametrize("name", known_figures())
def test_figures_are_measured_drawn_and_told(name: str, tmp_path: Path) -> None:
    lab = Lab(load_settings(), f"kvlinker-lab figure {name}", limit=EXAMPLES, shape="tiny")
    figure = find_figure(name)
    rows = figure.measure(lab)
    assert rows == json.loads(json.dumps(rows))
    page = tmp_path / "page.md"
    write_figure(page, figure, lab.report(rows, figure.shape), list(known_figures()))
    text = page.read_text()
    assert " ".join(figure.finding(rows).split()) in " ".join(text.split())
    assert f"kvlinker-lab figure {name}" in text
    assert (tmp_path / "page" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for row in figure.table_rows(rows):
        assert set(figure.columns) <= set(row)
