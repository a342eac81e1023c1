"""The help of every command shows all of what is written for it: brackets in it are no markup."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from kvlinker.base.installing import install_command
from kvlinker.cli import Commands, app
from kvlinker.cli.lazy import LazyGroup

WIDE = {"COLUMNS": "2000", "TERMINAL_WIDTH": "2000"}


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a command and those below it, by the words that call them."""
    yield path, command
    if isinstance(command, TyperGroup):
        context = typer.Context(command)
        for name in command.list_commands(context):
            if isinstance(command, LazyGroup) and name in command.summaries():
                yield from commands(command.load(name), (*path, name))
            else:
                yield from commands(command.get_command(context, name), (*path, name))


@pytest.fixture(scope="module")
def everything() -> dict[str, Any]:
    """All commands by the words that call them."""
    return {" ".join(path): command for path, command in commands(typer.main.get_command(app))}


def words(text: str) -> str:
    """Return the words of a text, without the frame around them."""
    return " ".join(re.sub(r"[│╭╮╰╯─\x08]", " ", text).split())


def written(text: str | None) -> str:
    """Return the words of a help text as they are meant, with what is escaped of markup."""
    return words((text or "").replace("\\[", "["))


def test_all_commands_are_found(everything: dict[str, Any]) -> None:
    assert {"serve", "ingest", "caches rekey", "bench ttft", "bench quality"} <= everything.keys()


def test_help_shows_what_is_written(everything: dict[str, Any], subtests: pytest.Subtests) -> None:
    for name, command in everything.items():
        with subtests.test(name or "kvlinker"):
            shown = words(CliRunner().invoke(app, [*name.split(), "--help"], env=WIDE).output)
            for paragraph in (command.help or "").split("\n\n"):
                assert written(paragraph) in shown
            for parameter in command.params:
                if getattr(parameter, "hidden", False):
                    continue
                assert written(getattr(parameter, "help", None)) in shown


def test_help_says_what_the_commands_say() -> None:
    """Summaries are read from sources, before a command is imported."""
    group = typer.main.get_command(app)
    assert isinstance(group, LazyGroup)
    for name, summary in group.summaries().items():
        assert words(summary).partition(".")[0] == words(group.load(name).help).partition(".")[0]
        assert summary


@pytest.mark.parametrize("name", ["fleet", "router"])
def test_a_command_of_a_missing_package_names_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {each: place for each, place in Commands.places.items() if each != name}
    monkeypatch.setattr(Commands, "places", left)
    run = CliRunner().invoke(app, [name, "--help"], env=WIDE)
    assert run.exit_code == 2
    command = install_command("fleet")
    assert run.output.strip().endswith(f"kvlinker {name} is a command of kvlinker-fleet: {command}")


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from kvlinker.cli import app; app(['--help'], standalone_mode=False);"
        " print(*sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = run.stdout.split()
    assert "kvlinker.cli" in loaded
    assert not {"kvlinker.settings", "kvlinker.cli.serve", "numpy", "pydantic", "httpx"} & set(
        loaded
    )


def test_metadata_without_its_package_ends_no_command(tmp_path: Path) -> None:
    gone = tmp_path / "gone-1.dist-info"
    gone.mkdir()
    (gone / "METADATA").write_text("Metadata-Version: 2.1\nName: gone\nVersion: 1\n")
    (gone / "entry_points.txt").write_text("[kvlinker.commands]\nlost = gone.command:lost\n")
    run = subprocess.run(
        [sys.executable, "-m", "kvlinker", "--help"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "lost" not in run.stdout
    assert "serve" in run.stdout
