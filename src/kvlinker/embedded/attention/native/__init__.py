"""Native code of the engine: compiled by the machine's C++ compiler when first needed, then kept per user."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from blake3 import blake3

COMPILE = "-std=c++17 -O2 -fPIC -fopenmp -fno-exceptions -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mfma"
LONGEST_BUILD = 120
"""The seconds that the compiler may take; usually it needs two."""


class NativeUnavailableError(Exception):
    """Raised when native code cannot be compiled or loaded on this machine; the message says why."""


def load_library(source: Path) -> ctypes.CDLL:
    """Return the C++ file as a library, compiled now unless it is in the cache. Safe for many processes at once.

    Raises NativeUnavailableError.
    """
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    try:
        version = _run([*compiler, "--version"])
        built_from = (COMPILE.encode(), shlex.join(compiler).encode(), version, source.read_bytes())
        name = f"{source.stem}-{blake3(b'|'.join(built_from)).hexdigest(16)}.so"
        library = _cache() / name
        if not library.is_file():
            _build(compiler, source, library)
        return ctypes.CDLL(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise NativeUnavailableError(_reason(error)) from error


def _build(compiler: list[str], source: Path, library: Path) -> None:
    """Compile ``source`` to ``library``. It is linked without OpenMP, so that it finds the functions of the OpenMP that
    torch has loaded: with two of them, the waiting threads of both would compete for the cores."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = Path(folder, "compiled.o"), Path(folder, "linked.so")
        _run([*compiler, *shlex.split(COMPILE), "-c", str(source), "-o", str(compiled)])
        _run([*compiler, "-shared", str(compiled), "-o", str(linked)])
        linked.replace(library)


def _run(command: list[str]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=LONGEST_BUILD).stdout


def _cache() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvlinker"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _reason(error: Exception) -> str:
    """Return the error as one line."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        return f"{error.cmd[0]} failed: {next((line for line in lines if 'error' in line), lines[-1])}"
    return str(error)
