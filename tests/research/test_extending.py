"""The page on extending: its data set, figure and benchmark are registered, found and run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from kvlinker import registry
from kvlinker.cli import app
from kvlinker.config import load_settings
from kvlinker.prompt.encoding import TextEncoder
from kvlinker.research.bench import benchmark
from kvlinker.research.bench.shapes import byte_tokenizer
from kvlinker.research.evaluation.contexts import ContextSplitter
from kvlinker.research.evaluation.datasets import formats, load_dataset
from kvlinker.research.figures import figure
from kvlinker.research.figures.lab import Lab
from kvlinker.research.figures.page import write_figure

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()


def code_of(section: str, language: str) -> str:
    """Return the code block of a section that is in this language."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    (code,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return str(code)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Installs a section's code as a module that an entry point names; registries forget it afterwards."""
    modules = (formats, figure, benchmark)
    groups = dict(zip(modules, ("kvlinker.dataset_formats", "kvlinker.figures", "kvlinker.benchmarks"), strict=True))
    before = {}
    for module in modules:
        module._registry.known()
        before[module] = dict(module._registry._values)

    def install(module: ModuleType, name: str, section: str) -> None:
        plugin = ModuleType(f"plugin_{name.replace('-', '_')}")
        monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
        code = compile(code_of(section, "python"), f"docs/extending.md: {section}", "exec")
        entry = EntryPoint(name, plugin.__name__, groups[module])
        monkeypatch.setattr(EntryPoint, "load", lambda self: exec(code, plugin.__dict__))
        for asked in (registry, benchmark):
            monkeypatch.setattr(asked, "entry_points", lambda group: [entry] if group == entry.group else [])
        monkeypatch.setattr(module._registry, "_loaded", False)
        benchmark.benchmark_summaries.cache_clear()

    yield install
    benchmark.benchmark_summaries.cache_clear()
    for module, values in before.items():
        module._registry._values.clear()
        module._registry._values.update(values)


def test_a_data_set_is_recognised_and_read(installed: Any, tmp_path: Path) -> None:
    path = tmp_path / "quiz.jsonl"
    path.write_text(code_of("A data set", "json"))
    installed(formats, "quiz", "A data set")
    dataset = load_dataset(str(path), ContextSplitter(TextEncoder(byte_tokenizer())))
    assert dataset.format == "quiz"
    (example,) = dataset.examples
    assert (example.task, example.answers) == ("bridges", ("1978",))
    assert example.passages == ("The bridge was built in 1911.\n\n", "It was closed in 1978.\n\n")


def test_a_figure_is_measured_and_shown(installed: Any, tmp_path: Path) -> None:
    installed(figure, "passage-lengths", "A figure")
    found = figure.find_figure("passage-lengths")
    assert list(figure.known_figures())[-1] == found.name  # behind those of the papers
    lab = Lab(load_settings(), "kvlinker bench figure passage-lengths", limit=3)
    rows = found.measure(lab)
    assert len(rows) == 3
    write_figure(tmp_path / "page.md", found, lab.report(rows), list(figure.known_figures()))
    assert "tokens on average." in (tmp_path / "page.md").read_text()


def test_a_benchmark_is_a_command(installed: Any, tmp_path: Path) -> None:
    installed(benchmark, "splitting", "A benchmark")
    listed = CliRunner().invoke(app, ["bench", "--help"])
    assert "splitting" in listed.output
    helped = CliRunner().invoke(app, ["bench", "splitting", "--help"])
    assert "Measure the time to split a text" in helped.output
    assert "--chunk-tokens" in helped.output
    assert "--plot" not in helped.output
    arguments = ["--shape", "tiny", "--repeat", "1", "--chunk-tokens", "32", "--json", str(tmp_path / "r.json")]
    result = CliRunner().invoke(app, ["bench", "splitting", *arguments])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "r.json").read_text())
    assert [row["case"] for row in content["results"]] == ["tokenise", "split"]
    assert content["settings"]["repeat"] == 1


def test_benchmarks_are_listed_as_they_are_without_being_imported() -> None:
    known = benchmark.known_benchmarks()
    assert benchmark.benchmark_summaries() == {name: one.summary for name, one in sorted(known.items())}
    assert {"ttft", "quality", "store", "decode"} <= known.keys()
