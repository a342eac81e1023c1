"""Every extra can be installed, alone and beside vLLM, and the newest Pythons have wheels of all
that is needed. Only metadata is fetched: nothing is installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tools.arm_system import platforms

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PACKAGES = sorted((ROOT / "integrations").glob("kvlinker-*"))
"""The packages of this repository that extras bring: no index has them before a release."""
SECONDS = 90
"""A resolution takes 35 to 55; an index that needs longer is taken for none."""

NO_INDEX = "after connection broken by"
"""What pip says of each request that is not answered, before it tries once more."""

NEWEST = [("3.14", "x86_64"), ("3.13", "aarch64")]
"""The newest Python that is tried on each machine: a resolution takes minutes on a slow one."""


def resolution(folder: Path, *what: str) -> subprocess.CompletedProcess[str]:
    """What pip says of installing this into an empty environment. Skips the test without an
    index."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--quiet",
        "--ignore-installed",
        "--prefer-binary",
    ]
    patience = ["--retries", "1", "--timeout", "15"]
    try:
        found = subprocess.run(
            [*command, *patience, *what],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"the package index is too slow: nothing was found in {SECONDS} s")
    if found.returncode and NO_INDEX in found.stderr:
        pytest.skip("no package index can be reached")
    return found


def test_all_has_every_extra_that_users_combine() -> None:
    """So that where ``all`` resolves, each of them does: the versions that it finds are theirs,
    too."""
    (everything,) = EXTRAS["all"]
    together = set(everything.removeprefix("kvlinker[").removesuffix("]").split(","))
    assert together == EXTRAS.keys() - {"all", "vllm", "peers", "dev"}


@pytest.mark.whole
@pytest.mark.parametrize("extras", ["all", "all,vllm"])
def test_extras_resolve(extras: str, tmp_path: Path) -> None:
    found = resolution(tmp_path, f"{ROOT}[{extras}]", *map(str, PACKAGES))
    assert found.returncode == 0, found.stderr[-2000:]


@pytest.mark.whole
@pytest.mark.parametrize(("python", "machine"), NEWEST)
def test_newest_pythons_have_wheels_of_the_pinned_versions(
    python: str, machine: str, tmp_path: Path
) -> None:
    """Of all that kvlinker needs, with a C library as old as Debian 12's."""
    target = ["--target", "none", "--only-binary", ":all:", "--python-version", python]
    pinned = ["--constraint", str(ROOT / "requirements.txt")]
    found = resolution(tmp_path, *target, *platforms(machine), *pinned, *PROJECT["dependencies"])
    assert found.returncode == 0, found.stderr[-2000:]
