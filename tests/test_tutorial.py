"""The tutorial's commands, pasted, give what it shows; ``…`` stands for any text, or for any lines."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvlinker.cli import app
from kvlinker.config import Settings
from kvlinker.config.settings import BUNDLED_MODEL

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()


def commands_of(page: str) -> list[tuple[list[str], str]]:
    """Return the arguments of each ``$ kvlinker`` command and what is shown beneath it."""
    blocks = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    return [
        (shlex.split(command), shown)
        for block in blocks
        for command, shown in re.findall(r"^\$ kvlinker (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    ]


def shows(shown: str, printed: str) -> bool:
    """Return whether a page's text shows what was printed, apart from spaces."""
    pattern = re.escape(" ".join(shown.split())).replace("…", ".*")
    return re.fullmatch(pattern, " ".join(printed.split())) is not None


@pytest.mark.slow
def test_every_command_prints_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kvlinker" / "examples"
    shutil.copytree(ROOT / "examples" / "notes", folder / "notes")
    model = tmp_path / "kvlinker" / "src" / "kvlinker" / "models" / "reader"
    model.parent.mkdir(parents=True)
    model.symlink_to(BUNDLED_MODEL)
    (questions,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (folder / "questions.jsonl").write_text(questions)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KVLINKER_STATE_DIR", str(tmp_path / "state"))
    ran = []
    for arguments, shown in commands_of(PAGE):
        if arguments[0] == "serve":  # which ends with the reader's patience
            continue
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert shows(shown, result.stdout), (arguments, result.stdout)
        ran.append(arguments[0])
    assert ran == ["ingest", "search", "ask", "check", "bench"]
    rows = json.loads((folder / "quality.json").read_text())["results"]
    assert {row["policy"] for row in rows} == {"full", "naive", "query-5"}


def test_the_server_is_started_with_options_that_exist() -> None:
    ((_, *options),) = [arguments for arguments, _ in commands_of(PAGE) if arguments[0] == "serve"]
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert {name.removeprefix("--").replace("-", "_") for name in given} <= set(Settings.model_fields)


def test_other_output_is_told_apart() -> None:
    assert shows("a …\n…\nOslo\n", "a b\nc\nOslo\n")
    assert not shows("a …\nOslo\n", "a b\nVarna\n")
