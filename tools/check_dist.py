"""Check a release: ``make dist`` runs this on the folder that holds the wheel and the source distribution.

The wheel is installed into a fresh environment without its dependencies. There the package must import, be of the
version in pyproject.toml, and have every file that is no Python; the source distribution must have them, too.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys
from importlib.metadata import version
from importlib.resources import files
import kvlinker
assert not kvlinker.__file__.startswith(sys.argv[1]), f"{kvlinker.__file__} is the source, not the wheel"
missing = [name for name in sys.argv[2:] if not files("kvlinker").joinpath(name).is_file()]
assert not missing, f"the wheel lacks {missing}"
print(version("kvlinker"))
"""


def package_data() -> list[str]:
    """Return the files of the package that git knows and that are no Python, relative to it."""
    listed = subprocess.run(
        ["git", "ls-files", "src/kvlinker"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    return [name.removeprefix("src/kvlinker/") for name in listed if name and not name.endswith(".py")]


def version_in(wheel: Path, data: list[str]) -> str:
    """Return the version of a wheel as it is when installed; raises CalledProcessError where something is missing."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        subprocess.run([python, "-I", "-m", "pip", "install", "--quiet", "--no-deps", wheel.resolve()], check=True)
        return subprocess.run(
            [python, "-I", "-c", PROGRAM, str(ROOT), *data], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
        ).stdout.strip()


def main(dist: Path) -> None:
    expected = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    data = package_data()
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    if (found := version_in(wheel, data)) != expected:
        sys.exit(f"{wheel.name} installs version {found}, but pyproject.toml says {expected}")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    if missing := [name for name in data if f"src/kvlinker/{name}" not in names]:
        sys.exit(f"{source.name} lacks {missing}")
    print(f"{wheel.name} and {source.name} are sound: {len(data)} data files, version {expected}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
