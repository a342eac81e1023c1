"""Compile native code for all kinds of processor of an architecture: ``make dist`` puts the
libraries into wheels.

``python tools/native_libraries.py FOLDER MACHINE COMPILER [OPTION …]`` makes ``FOLDER/KIND.so``
for each kind, by the compiler, which may be one for another system. As when code is compiled on a
user's machine, no OpenMP is linked: its functions are found in the one that torch has loaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvlinker.engines import native
from kvlinker.engines.native.targets import TARGETS, Target

LINK = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-s"]


def make_library(compiler: list[str], target: Target, folder: Path) -> Path:
    """Compile all native code for a kind of processor, and link it to a library in ``folder``."""
    library = folder / f"{target.name}.so"
    options = [*native.COMPILE.split(), *target.options.split()]

    def compiled(source: Path) -> str:
        result = str(Path(name, f"{source.stem}.o"))
        subprocess.run([*compiler, *options, "-c", str(source), "-o", result], check=True)
        return result

    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(os.cpu_count()) as threads:
        sources = sorted(Path(native.__file__).parent.glob("*.cpp"))
        parts = list(threads.map(compiled, sources))
        command = [*compiler, "-shared", *LINK, *parts, "-o", str(library)]
        subprocess.run(command, check=True)
    return library


def main(folder: Path, machine: str, compiler: list[str]) -> None:
    """Make a library in ``folder`` for each kind of processor of ``machine``."""
    folder.mkdir(parents=True, exist_ok=True)
    for target in TARGETS:
        if target.machine == machine:
            library = make_library(compiler, target, folder)
            print(f"{library}: {library.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
