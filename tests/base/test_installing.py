"""The command that installs an extra works where it is shown."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvlinker.base import installing
from kvlinker.base.installing import install_command


def installed(monkeypatch: pytest.MonkeyPatch, told: str | None) -> None:
    """kvlinker is installed as pip notes it in ``direct_url.json``."""
    package = SimpleNamespace(read_text=lambda _: told)
    monkeypatch.setattr(installing, "distribution", lambda _: package)


@pytest.mark.parametrize("told", [None, '{"url": "file:///tmp/kvlinker.whl"}', "{"])
def test_a_package(monkeypatch: pytest.MonkeyPatch, told: str | None) -> None:
    installed(monkeypatch, told)
    assert install_command("zstd") == "pip install 'kvlinker[zstd]'"


def test_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    installed(monkeypatch, f'{{"dir_info": {{"editable": true}}, "url": "{folder.as_uri()}"}}')
    monkeypatch.setattr(sys, "executable", str(folder / ".venv" / "bin" / "python"))
    monkeypatch.chdir(folder)
    assert install_command("zstd") == ".venv/bin/pip install -e '.[zstd]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("zstd") == "'a b/.venv/bin/pip' install -e 'a b[zstd]'"
    (folder / "integrations" / "kvlinker-fleet").mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert install_command("fleet") == (
        ".venv/bin/pip install -e integrations/kvlinker-fleet -e '.[fleet]'"
    )
