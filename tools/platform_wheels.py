"""Make wheels with native code from the one without: ``make dist`` runs this.

``python tools/platform_wheels.py DIST LIBRARIES PLATFORM`` takes the pure wheel in ``DIST`` and the
libraries in a folder, one for each kind of processor, and writes a wheel with these for a platform
such as ``linux_x86_64``. On Linux, auditwheel then reads what the libraries link to, and gives the
wheel the oldest ``manylinux`` tag that has it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SHIPPED = "kvlinker/engines/native/shipped"


def with_libraries(pure: Path, libraries: Path, platform: str, folder: Path) -> Path:
    """Write a wheel to ``folder`` that has all of ``pure`` and the libraries."""
    run("wheel", "unpack", "--dest", folder, pure)
    (unpacked,) = (each for each in folder.iterdir() if each.is_dir())
    shipped = unpacked / SHIPPED
    shipped.mkdir()
    for library in sorted(libraries.glob("*.so")):
        shutil.copy(library, shipped)
    (described,) = unpacked.glob("*.dist-info/WHEEL")
    text = described.read_text(encoding="utf-8")
    text = text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    text = text.replace("Tag: py3-none-any", f"Tag: py3-none-{platform}")
    described.write_text(text, encoding="utf-8")
    run("wheel", "pack", "--dest", folder, unpacked)
    (made,) = folder.glob("*.whl")
    return made


def run(module: str, *arguments: str | Path) -> None:
    """Run a tool of this environment, which may run others of it. Raises CalledProcessError."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", module, *map(str, arguments)]
    subprocess.run(command, env=os.environ | {"PATH": path}, check=True)


def main(dist: Path, libraries: Path, platform: str) -> None:
    """Write the wheel for ``platform`` to ``dist``."""
    (pure,) = dist.glob("kvlinker-*-none-any.whl")
    with tempfile.TemporaryDirectory() as folder:
        made = with_libraries(pure, libraries, platform, Path(folder))
        if platform.startswith("linux"):
            run("auditwheel", "repair", "--wheel-dir", dist, made)
        else:
            shutil.copy(made, dist)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
