"""Every extra can be installed, alone and beside vLLM. Only metadata is fetched: nothing is installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NO_INDEX = ("Failed to establish a new connection", "Name or service not known", "from versions: none")


def resolution(extras: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What pip says of installing these extras into an empty environment."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--prefer-binary"]
    return subprocess.run([*command, f"{ROOT}[{extras}]"], cwd=folder, capture_output=True, text=True, timeout=600)


def test_all_has_every_extra_that_users_combine() -> None:
    """So that where ``all`` resolves, each of them does: the versions that it finds are theirs, too."""
    (everything,) = EXTRAS["all"]
    together = set(everything.removeprefix("kvlinker[").removesuffix("]").split(","))
    assert together == EXTRAS.keys() - {"all", "vllm", "peers", "dev"}


@pytest.mark.slow
def test_all_extras_resolve_together_with_vllm(tmp_path: Path) -> None:
    """Whatever is a part of this resolves, too."""
    try:
        found = resolution("all,vllm", tmp_path)
    except subprocess.TimeoutExpired:
        pytest.skip("the package index takes too long to answer")
    if found.returncode and any(sign in found.stderr for sign in NO_INDEX):
        pytest.skip("no package index can be reached")
    assert found.returncode == 0, found.stderr[-2000:]
