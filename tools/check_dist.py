"""Check a release: ``make dist`` runs this on the folder that holds the wheel and the source
distribution.

The wheel, which was built from the source distribution, is installed into a fresh environment.
There the package must import, be of the version in pyproject.toml, and have every file that is no
Python; the source distribution must have them, too. Then the environment sees the packages of
another one, which spares downloading gigabytes: all extras must be installable beside them, and
``kvlinker serve`` must answer with the model in the box.
"""

from __future__ import annotations

import os
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
path = kvlinker.__file__
assert not path.startswith(sys.argv[1]), f"{path} is the source, not the wheel"
missing = [name for name in sys.argv[2:] if not files("kvlinker").joinpath(name).is_file()]
assert not missing, f"the wheel lacks {missing}"
print(version("kvlinker"))
"""
SERVING = """
from kvlinker import Client
from kvlinker.settings import load_settings
from kvlinker.quality.bench.load.servers import kvlinker_server
with kvlinker_server(load_settings()) as server, Client(server.url) as client:
    question = "Tom Reyes lives in Oslo.\\n\\nQuestion: Where does Tom Reyes live?"
    messages = [{"role": "user", "content": question}]
    print(client.chat_completion(messages, max_tokens=8, temperature=0).text)
"""


def package_data() -> list[str]:
    """Return the files of the package that git knows and that are no Python, relative to it."""
    listed = subprocess.run(
        ["git", "ls-files", "src/kvlinker"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    return [
        name.removeprefix("src/kvlinker/") for name in listed if name and not name.endswith(".py")
    ]


def version_in(python: Path, wheel: Path, data: list[str]) -> str:
    """Install a wheel alone, and return its version; raises CalledProcessError where something is
    missing."""
    subprocess.run(
        [python, "-I", "-m", "pip", "install", "--quiet", "--no-deps", wheel.resolve()], check=True
    )
    return subprocess.run(
        [python, "-I", "-c", PROGRAM, str(ROOT), *data],
        cwd=python.parent,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()


def put_behind(folder: Path, other: Path) -> None:
    """Let the environment in ``folder`` see the packages of another one, behind its own."""
    (own,), (packages,) = (
        list(each.glob("lib/python3*/site-packages")) for each in (folder, other)
    )
    (own / "behind.pth").write_text(f"{packages.resolve()}\n", encoding="utf-8")


def answer_of(python: Path) -> str:
    """Serve the model in the box with an environment's Python, and return what it answers to a
    question."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVLINKER_", "PYTHON"))
    }
    command = [str(python), "-I", "-c", SERVING]
    done = subprocess.run(
        command, cwd=python.parent, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return str(done.stdout).strip()


def main(dist: Path, other: Path) -> None:
    """Check the release in ``dist``; ``other`` is an environment with what kvlinker needs."""
    expected = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "version"
    ]
    data = package_data()
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    if missing := [name for name in data if f"src/kvlinker/{name}" not in names]:
        sys.exit(f"{source.name} lacks {missing}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder, with_pip=True)
        python = folder / "bin" / "python"
        if (found := version_in(python, wheel, data)) != expected:
            sys.exit(f"{wheel.name} installs version {found}, but pyproject.toml says {expected}")
        put_behind(folder, other)
        subprocess.run(
            [python, "-I", "-m", "pip", "install", "--quiet", "--dry-run", "kvlinker[all]"],
            check=True,
        )
        answer = answer_of(python)
    if not answer:
        sys.exit(f"{wheel.name} serves a model that says nothing")
    print(
        f"{wheel.name} and {source.name} are sound: {len(data)} data files, version {expected},"
        f" answer {answer!r}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
