"""``kvlinker service`` writes a unit of systemd, and speaks with the manager of the user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvlinker.cli import app

runner = CliRunner()


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a systemctl that does nothing writes what it was asked."""
    said = tmp_path / "said"
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {said}\nexit ${{SYSTEMCTL_ENDS:-0}}\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return said


def unit(tmp_path: Path) -> Path:
    return tmp_path / "config" / "systemd" / "user" / "kvlinker.service"


def test_install_and_remove(said: Path, tmp_path: Path) -> None:
    model, config = tmp_path / 'a "model" of 100%', tmp_path / "kvlinker.toml"
    model.mkdir()
    config.write_text("port = 8123\n")
    result = runner.invoke(app, ["service", "install", str(model), "--config", str(config)])
    assert result.exit_code == 0, result.stderr
    (command,) = [
        line for line in unit(tmp_path).read_text().splitlines() if line.startswith("ExecStart")
    ]
    written = str(model).replace('"', '\\"').replace("%", "%%")
    assert command == (
        f'ExecStart="{sys.executable}" "-m" "kvlinker" "serve" "--model" "{written}"'
        f' "--config" "{config}"'
    )
    assert said.read_text().splitlines() == [
        "--user show-environment",
        "--user daemon-reload",
        "--user enable kvlinker.service",
        "--user restart kvlinker.service",
    ]
    assert runner.invoke(app, ["service", "remove"]).exit_code == 0
    assert not unit(tmp_path).exists()
    again = runner.invoke(app, ["service", "remove"])
    assert (again.exit_code, "there is no" in again.stderr) == (1, True)


def test_without_a_manager_nothing_is_written(
    said: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYSTEMCTL_ENDS", "1")
    result = runner.invoke(app, ["service", "install"])
    assert (result.exit_code, "systemctl --user show-environment" in result.stderr) == (1, True)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = runner.invoke(app, ["service", "install"])
    assert (result.exit_code, "there is no systemd here" in result.stderr) == (1, True)
    assert not unit(tmp_path).exists()


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="checks units")
def test_systemd_reads_the_unit(said: Path, tmp_path: Path) -> None:
    assert runner.invoke(app, ["service", "install", "org/model"]).exit_code == 0
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(unit(tmp_path))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "kvlinker.service" not in checked.stderr, checked.stderr
