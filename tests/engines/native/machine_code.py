"""What the compiler made of native code: read, so it needs no processor of that kind."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvlinker.engines import native
from kvlinker.engines.native.targets import TARGETS

readable = pytest.mark.skipif(
    shutil.which("objdump") is None or platform.machine() != "x86_64",
    reason="no machine code of x86 here, or no objdump to read it with",
)


def functions(file: str, target: str, name: str) -> list[list[str]]:
    """The instructions of each function of a C++ file whose symbol matches ``name``."""
    (kind,) = (each for each in TARGETS if each.name == target)
    library = native.load_library(Path(native.__file__).with_name(file), kind)
    command = ["objdump", "-d", "--no-show-raw-insn", library._name]
    code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    parts = (part.splitlines() for part in code.split("\n\n"))
    return [
        part[1:]
        for part in parts
        if part and "@plt" not in part[0] and re.search(name, part[0].partition("<")[2])
    ]
