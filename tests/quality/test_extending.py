"""The page on extending: its data set and benchmark are registered, found and run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from kvlinker.base import registry
from kvlinker.base.errors import InvalidRequestError
from kvlinker.cli import app
from kvlinker.prompting.encoding import TextEncoder
from kvlinker.quality.bench.harness import benchmark
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker.quality.evaluation.contexts import ContextSplitter
from kvlinker.quality.evaluation.datasets import formats, load_dataset
from tests.quality.evaluation.conftest import questions_of

Install = Callable[[ModuleType, str, str], None]
PLUGIN = "plugin_of_the_guide"
PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()


def code_of(section: str, language: str, page: str = PAGE) -> str:
    """Return the first code block of a page's section that is in this language."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    code, *_ = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return str(code)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Install]:
    """Installs a section's code as a module that an entry point names; registries forget it
    afterwards."""
    groups = {formats: "kvlinker.dataset_formats", benchmark: "kvlinker.benchmarks"}
    (tmp_path / "packages").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "packages")

    def install_section(module: ModuleType, name: str, section: str) -> None:
        (tmp_path / "packages" / f"{PLUGIN}.py").write_text(code_of(section, "python"))
        entry = EntryPoint(name, PLUGIN, groups[module])
        for asking in (registry, benchmark):
            monkeypatch.setattr(
                asking, "entry_points", lambda group: [entry] if group == entry.group else []
            )
        own = module._registry
        if module is not benchmark:
            own.known()
        monkeypatch.setattr(own, "_values", dict(own._values))
        monkeypatch.setattr(own, "_loaded", False)
        benchmark.declared_benchmarks.cache_clear()

    yield install_section
    benchmark.declared_benchmarks.cache_clear()
    sys.modules.pop(PLUGIN, None)


def test_a_data_set_is_recognised_and_read(install: Install, tmp_path: Path) -> None:
    path = tmp_path / "quiz.jsonl"
    path.write_text(code_of("A data set", "json"))
    install(formats, "quiz", "A data set")
    dataset = load_dataset(str(path), ContextSplitter(TextEncoder(byte_tokenizer())))
    assert dataset.format == "quiz"
    (example,) = questions_of(dataset)
    assert (example.task, example.answers) == ("bridges", ("1978",))
    assert example.passages == ("The bridge was built in 1911.\n\n", "It was closed in 1978.\n\n")


def test_a_benchmark_is_a_command(install: Install, tmp_path: Path) -> None:
    install(benchmark, "splitting", "A benchmark")
    listed = CliRunner().invoke(app, ["bench", "--help"])
    assert "splitting" in listed.output
    helped = CliRunner().invoke(app, ["bench", "splitting", "--help"])
    assert "Measure the time to split a text" in helped.output
    assert "--chunk-tokens" in helped.output
    assert "--plot" not in helped.output
    arguments = [
        "--shape",
        "tiny",
        "--repeat",
        "1",
        "--chunk-tokens",
        "32",
        "--json",
        str(tmp_path / "r.json"),
    ]
    result = CliRunner().invoke(app, ["bench", "splitting", *arguments])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "r.json").read_text())
    assert [row["case"] for row in content["results"]] == ["tokenise", "split"]
    assert content["settings"]["repeat"] == 1


def test_benchmarks_are_listed_as_they_are_without_being_imported() -> None:
    declared = benchmark.declared_benchmarks()
    assert " ".join(declared) == "decode quality ttft"
    for name, one in declared.items():
        assert (benchmark.find_benchmark(name).run.__doc__ or "").startswith(one.summary)
    with pytest.raises(
        InvalidRequestError, match="Unknown benchmark 'speed'; known are decode, quality, ttft"
    ):
        benchmark.find_benchmark("speed")
