"""``kvlinker policies`` and ``kvlinker calibrate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvlinker.base.installing import install_command
from kvlinker.cli import app
from kvlinker.engines.contract import joining
from kvlinker.linking import known_policies

runner = CliRunner()


def test_policies_are_listed() -> None:
    shown = runner.invoke(app, ["policies"], env={"COLUMNS": "80"}).output
    for family in known_policies():
        assert family in shown
    assert "cacheblend-auto[-<percent, 0 to 100>][-onestep][-k|v][-d<spread, 0 to 100>]\n" in shown


def test_texts_of_policies_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plug-ins write of intervals, paths and lists in their docstrings."""
    (own, *_) = known_policies().values()
    described = own.describe() | {"description": "Selects [red] or [/etc].", "restriction": "[/x]"}
    monkeypatch.setattr("kvlinker.linking.describe_policies", lambda _: [described])
    result = runner.invoke(app, ["policies"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "Selects [red] or [/etc]." in result.output
    assert "[/x]" in result.output


def test_policies_are_listed_as_json() -> None:
    listed = json.loads(runner.invoke(app, ["policies", "--json"]).output)
    supported = {"supported": True, "restriction": None}
    assert listed == [policy.describe() | supported for policy in known_policies().values()]


@pytest.mark.parametrize("command", ["policies", "serve"])
def test_an_engine_that_is_not_installed_names_its_extra(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "entry_points", lambda **_: ())
    run = runner.invoke(app, [command, "--engine", "vllm"], env={"COLUMNS": "400"})
    assert run.exit_code == 2 if command == "policies" else 1
    assert f"The engine vllm is not installed here. Run {install_command('vllm')}" in run.output


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    rows = [
        {
            "passages": ["Mira Holt lives in Varna.", "Otto Lund lives in Bergen."],
            "question": f"Who are you {n}?",
        }
        for n in range(2)
    ]
    path.write_text("".join(json.dumps(row | {"answers": ["Nobody"]}) + "\n" for row in rows))
    return path


@pytest.mark.whole
@pytest.mark.parametrize("arguments", [["--values", "1"], ["query-{}"], ["legolink-{}"]])
def test_calibration_says_when_examples_cannot_tell(questions: Path, arguments: list[str]) -> None:
    """The values that are tried by default fit each policy."""
    result = runner.invoke(
        app, ["calibrate", *arguments, "--dataset", str(questions), "--threads", "1"]
    )
    assert result.exit_code == 2
    assert "cannot tell settings apart" in result.output


BAD_CALIBRATIONS = [
    (["legolink-4"], "must have one {}"),
    (["legolink-{}", "--values", "0"], "from 1 to 4096"),
    (["--dataset", "/nowhere.jsonl"], "/nowhere.jsonl"),
    (["query-{}", "--target", "2"], "--target"),
    (["query-{}", "--target", "0"], "above 0, at most 1"),
    (["query-{}", "--target", "nan"], "--target"),
]


def test_bad_calibrations_are_refused(subtests: pytest.Subtests) -> None:
    for arguments, message in BAD_CALIBRATIONS:
        with subtests.test(" ".join(arguments)):
            result = runner.invoke(app, ["calibrate", *arguments])
            assert result.exit_code == 2
            assert message in result.output
