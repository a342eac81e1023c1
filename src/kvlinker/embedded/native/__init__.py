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
"""Seconds; it takes three."""


class NativeUnavailableError(Exception):
    """Native code cannot be had on this machine; the message says why."""


def load_library(source: Path) -> ctypes.CDLL:
    """Return the C++ file as a library, from the cache or compiled now; it may include headers that lie beside it.

    Any number of processes may do so at once. Raises NativeUnavailableError.
    """
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    try:
        version = _run([*compiler, "--version"])
        sources = [file.read_bytes() for file in (source, *sorted(source.parent.glob("*.h")))]
        built_from = (COMPILE.encode(), shlex.join(compiler).encode(), version, *sources)
        name = f"{source.stem}-{blake3(b'|'.join(built_from)).hexdigest(16)}.so"
        library = _cache() / name
        if not library.is_file():
            _build(compiler, source, library)
        return ctypes.CDLL(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise NativeUnavailableError(_reason(error)) from error


def _build(compiler: list[str], source: Path, library: Path) -> None:
    """Linking without OpenMP leaves its functions to be found in the OpenMP that torch has loaded: with another one,
    the waiting threads of both would fight for the cores."""
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
    """One line."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        return f"{error.cmd[0]} failed: {next((line for line in lines if 'error' in line), lines[-1])}"
    return str(error)
