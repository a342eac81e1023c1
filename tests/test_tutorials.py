"""The tutorials' commands, pasted into a shell, print what the pages show; ``…`` stands for any
text, or any lines."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvlinker.settings import Settings

ROOT = Path(__file__).parents[1]
PORT = "8000"
MARK = "— next command —"
SHELL = """
set -m
# What a reader installs goes beside this environment rather than into it.
pip() {
  python -m pip "$1" --no-deps --no-build-isolation --disable-pip-version-check \\
    --target "$SITE" "${@:2}"
}
"""


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def commands_of(text: str) -> list[tuple[str, str]]:
    """Return a page's commands in order, each with what is shown beneath it."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [
        found
        for block in blocks
        for found in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    ]


def files_of(text: str) -> dict[str, str]:
    """Return the files that a page shows by name: a block whose first line is a comment with
    nothing but a path."""
    blocks = re.findall(r"```\w+\n# ([\w./-]+\.\w+)\n(.*?)```", text, re.DOTALL)
    return dict(blocks)


def shows(shown: str, printed: str) -> bool:
    """Return whether a page's text shows what was printed, apart from spaces."""
    pattern = re.escape(" ".join(shown.split())).replace("…", ".*")
    return re.fullmatch(pattern, " ".join(printed.split())) is not None


def outputs_of(commands: list[str], folder: Path, environment: Mapping[str, str]) -> list[str]:
    """Run commands in one shell, as pasted, and return what each printed. What a command leaves
    running is ended."""
    script = SHELL + "".join(f"{command}\necho '{MARK}'\n" for command in commands)
    shell = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, complaints = shell.communicate(timeout=600)
    finally:
        subprocess.run(["pkill", "--session", str(shell.pid)], check=False)
    *outputs, rest = printed.split(f"{MARK}\n")
    assert (len(outputs), rest) == (len(commands), ""), complaints
    print(complaints)  # shown where a test fails
    return outputs


def run_page(text: str, folder: Path, **environment: str) -> None:
    """Run a page's commands in the folder, but for servers in the foreground, and compare what they
    print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, content in files_of(text).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    site = folder.parent / "site"
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "SITE": str(site),
    }
    commands = [
        (command.replace(PORT, port), shown)
        for command, shown in commands_of(text)
        if not command.startswith("kvlinker serve") or command.endswith("&")
    ]
    others = {name: value for name, value in os.environ.items() if not name.startswith("KVLINKER_")}
    outputs = outputs_of([command for command, _ in commands], folder, others | own | environment)
    for (command, shown), printed in zip(commands, outputs, strict=True):
        assert shows(shown, printed), f"{command}\n{printed}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder."""
    made = tmp_path / "own"
    made.mkdir()
    return made


@pytest.mark.whole
def test_your_documents_and_your_model(folder: Path, tmp_path: Path) -> None:
    text = page("tutorial.md")
    (questions,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (folder / "questions.jsonl").write_text(questions)
    run_page(text, folder, KVLINKER_STATE_DIR=str(tmp_path / "state"))
    rows = json.loads((folder / "quality.json").read_text())["results"]
    scores = {row["policy"]: row["score"] for row in rows if row["main"]}
    assert scores.keys() == {"full", "naive", "query-5"}
    assert scores["full"] == 1.0, "the page's own questions are answered"


@pytest.mark.whole
@pytest.mark.skipif(
    not (shutil.which("curl") and shutil.which("openssl")), reason="the page uses curl and openssl"
)
def test_a_server_for_others(folder: Path) -> None:
    run_page(page("tutorial-operators.md"), folder)


@pytest.mark.whole
def test_a_policy_of_your_own(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="builds the package")
    run_page(page("tutorial-policies.md"), folder, KVLINKER_STATE_DIR=str(tmp_path / "state"))
    rows = json.loads((folder / "quality.json").read_text())["results"]
    assert {"edges-2", "legolink-4"} <= {row["policy"] for row in rows}


@pytest.mark.parametrize("name", ["tutorial.md", "tutorial-operators.md"])
def test_servers_are_started_with_options_that_exist(name: str) -> None:
    started = [
        command for command, _ in commands_of(page(name)) if command.startswith("kvlinker serve")
    ]
    assert started
    for command in started:
        given = [word for word in shlex.split(command) if word.startswith("--")]
        assert {word.removeprefix("--").replace("-", "_") for word in given} <= {
            *Settings.model_fields,
            "config",
        }


def test_other_output_is_told_apart() -> None:
    assert shows("a …\n…\nOslo\n", "a b\nc\nOslo\n")
    assert not shows("a …\nOslo\n", "a b\nVarna\n")
