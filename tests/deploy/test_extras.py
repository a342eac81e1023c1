"""Every extra can be installed, alone and beside vLLM. Only metadata is fetched: nothing is
installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
PACKAGES = sorted((ROOT / "integrations").glob("kvlinker-*"))
"""The packages of this repository that extras bring: no index has them before a release."""
SECONDS = 90
"""A resolution takes 35 to 55; an index that needs longer is taken for none."""

NO_INDEX = "after connection broken by"
"""What pip says of each request that is not answered, before it tries once more."""


def resolution(extras: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What pip says of installing these extras into an empty environment. Raises TimeoutExpired."""
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
    return subprocess.run(
        [*command, *patience, f"{ROOT}[{extras}]", *map(str, PACKAGES)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_all_has_every_extra_that_users_combine() -> None:
    """So that where ``all`` resolves, each of them does: the versions that it finds are theirs,
    too."""
    (everything,) = EXTRAS["all"]
    together = set(everything.removeprefix("kvlinker[").removesuffix("]").split(","))
    assert together == EXTRAS.keys() - {"all", "vllm", "peers", "dev"}


@pytest.mark.whole
@pytest.mark.parametrize("extras", ["all", "all,vllm"])
def test_extras_resolve(extras: str, tmp_path: Path) -> None:
    try:
        found = resolution(extras, tmp_path)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the package index is too slow: nothing was found in {SECONDS} s")
    if found.returncode and NO_INDEX in found.stderr:
        pytest.skip("no package index can be reached")
    assert found.returncode == 0, found.stderr[-2000:]
