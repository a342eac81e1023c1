"""Check a release: ``make dist`` runs this on the folder that holds the wheels and the source
distribution.

The wheel for this machine is installed into a fresh environment, with all that it needs. That has
no compiler: nothing but the environment's own programs is on the PATH. There the package must
import, be of the version in pyproject.toml, and have every file that is no Python; the source
distribution must have them, too. ``kvlinker serve`` must compute by the native code in the wheel
with one OpenMP, that of torch, and answer README's first program. What was installed is described
in a bill of materials, beside the wheels. Each package that joins the core is then installed beside
it, and must be of the same version, import, and load what its entry points bring to the core.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from platform import machine
from urllib.error import URLError
from urllib.request import urlopen

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys
from importlib.metadata import version
from importlib.resources import files
import kvlinker
path = kvlinker.__file__
assert not path.startswith(sys.argv[1]), f"{path} is the source, not the wheel"
missing = [name for name in sys.argv[2:] if not files("kvlinker").joinpath(name).is_file()]
assert not missing, f"the wheel lacks {missing}"
print(version("kvlinker"))
"""
JOINING = """
import sys
from importlib import import_module
from importlib.metadata import distribution
package = distribution(sys.argv[1])
import_module(sys.argv[1])
for point in package.entry_points:
    if point.group.startswith("kvlinker."):
        point.load()
print(package.version)
"""
JOINED = ("kvlinker_fleet", "kvlinker_vllm")
"""The packages that join the core, without what they need beside it: vLLM and Ray are not
installed."""

OPENMP = re.compile(r"\S*/lib(?:g|i|)omp[^/\s]*$", re.MULTILINE)


def package_data() -> list[str]:
    """Return the files of the package that git knows and that are no Python, relative to it."""
    listed = subprocess.run(
        ["git", "ls-files", "src/kvlinker"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    return [
        name.removeprefix("src/kvlinker/") for name in listed if name and not name.endswith(".py")
    ]


def install(python: Path, *what: str) -> None:
    """Install packages in the versions that the tests ran with, and what they need."""
    pinned = ["--constraint", str(ROOT / "requirements.txt")]
    command = [str(python), "-I", "-m", "pip", "install", "--quiet", "--no-compile", *pinned, *what]
    subprocess.run(command, check=True)


def version_in(python: Path, data: list[str]) -> str:
    """Return the version that an environment has; raises CalledProcessError where something is
    missing."""
    command = [str(python), "-I", "-c", PROGRAM, str(ROOT), *data]
    return subprocess.run(
        command, cwd=python.parent, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def write_bill_of_materials(python: Path, place: Path) -> None:
    """Write what an environment has installed, as CycloneDX."""
    own = [sys.executable, "-m", "cyclonedx_py", "environment"]
    about = ["--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "application"]
    subprocess.run([*own, *about, "--output-file", str(place), str(python)], check=True)


def without_compiler(python: Path, home: Path) -> dict[str, str]:
    """Return the variables of a process that has an environment's programs alone."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVLINKER_", "PYTHON", "XDG_")) and name != "CXX"
    }
    return kept | {"PATH": str(python.parent), "HOME": str(home)}


@contextmanager
def serving(python: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Run ``kvlinker serve`` as README's first program wants it; yield its address and its process,
    once it is ready."""
    command = [str(python.with_name("kvlinker")), "serve", "--port", "0", "--implicit", "auto"]
    with subprocess.Popen(
        command,
        env=dict(environment),
        cwd=python.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        assert server.stdout is not None
        try:
            for line in server.stdout:
                if found := re.search(r"address\s+(http://[\d.:]+)", line):
                    wait_for(f"{found[1]}/health")
                    yield found[1], server.pid
                    break
            else:
                sys.exit("kvlinker serve has ended before it was ready")
        finally:
            server.terminate()


def wait_for(url: str, seconds: float = 300.0) -> None:
    """Wait until a server that has said its address answers there. Raises URLError."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            urlopen(url).close()
            return
        except URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def answers_of(python: Path, environment: Mapping[str, str], url: str) -> str:
    """Run README's first program, and return what it prints."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (program, *_) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    program = program.replace("http://localhost:8000", url)
    return subprocess.run(
        [str(python), "-c", program],
        env=dict(environment),
        cwd=python.parent,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def openmp_of(process: int) -> set[str]:
    """Return the OpenMP libraries that a process has loaded."""
    return set(OPENMP.findall(Path(f"/proc/{process}/maps").read_text(encoding="utf-8")))


def check_serving(python: Path, home: Path) -> str:
    """Check that an environment without a compiler serves with shipped native code, and return its
    answers."""
    environment = without_compiler(python, home)
    command = [str(python.with_name("kvlinker")), "--version"]
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    if "shipped" not in said.stdout:
        sys.exit(f"the wheel's native code is not used: {said.stdout}")
    with serving(python, environment) as (url, process):
        found = answers_of(python, environment, url)
        loaded = openmp_of(process)
    if [line.partition(":")[0] for line in found.splitlines()] != ["Varna", "Oslo", "Lima"]:
        sys.exit(f"README's first program prints {found!r}")
    if len(loaded) != 1 or "torch" not in loaded.copy().pop():
        sys.exit(f"the server does not compute with torch's OpenMP alone: {loaded}")
    return said.stdout.strip()


def check_joined(python: Path, dist: Path, expected: str) -> None:
    """Check the wheels of the packages that join the core, in an environment that has it."""
    for package in JOINED:
        (wheel,) = dist.glob(f"{package}-*.whl")
        install(python, "--no-deps", str(wheel.resolve()))
        command = [str(python), "-I", "-c", JOINING, package]
        found = subprocess.run(
            command, cwd=python.parent, stdout=subprocess.PIPE, text=True, check=True
        ).stdout.strip()
        if found != expected:
            sys.exit(f"{wheel.name} installs version {found}, but the core is {expected}")


def main(dist: Path) -> None:
    """Check the release in ``dist``."""
    expected = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "version"
    ]
    data = package_data()
    (source,) = dist.glob("*.tar.gz")
    (wheel,) = dist.glob(f"*_{machine()}.whl")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    if missing := [name for name in data if f"src/kvlinker/{name}" not in names]:
        sys.exit(f"{source.name} lacks {missing}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "environment", with_pip=True)
        python = folder / "environment" / "bin" / "python"
        install(python, str(wheel.resolve()))
        if (found := version_in(python, data)) != expected:
            sys.exit(f"{wheel.name} installs version {found}, but pyproject.toml says {expected}")
        write_bill_of_materials(python, dist / f"kvlinker-{expected}.cdx.json")
        check_joined(python, dist, expected)
        install(python, "--dry-run", "--find-links", str(dist.resolve()), "kvlinker[all]")
        install(python, "openai")
        said = check_serving(python, folder / "home")
    print(f"{wheel.name} and {source.name} are sound: {len(data)} data files, {said}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
