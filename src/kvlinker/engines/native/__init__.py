"""Native code for CPUs, which both engines use. Wheels ship it, compiled, as one library for each
kind of processor; elsewhere, and behind ``build_here``, the machine's C++ compiler compiles a
file when it is first needed, and the result is kept per user.

A module that has a native variant takes its functions from here (``functions``), compares what they
compute with PyTorch on a small case (``require_close``), and falls back where that fails
(``or_fall_back``).
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from blake3 import blake3
from torch import Tensor

from kvlinker.engines.native import targets
from kvlinker.engines.native.targets import Target

T = TypeVar("T")

Function = Callable[[ctypes.Structure], None]
"""A C++ function that takes one structure by address, and returns nothing."""

SHIPPED = Path(__file__).with_name("shipped")
"""The folder in which wheels have a library for each kind of processor."""

COMPILE = "-std=c++17 -O2 -fPIC -fopenmp -fno-exceptions"
LONGEST_BUILD = 600
"""Seconds that a run of the compiler may take; it takes three, beside much else two minutes."""

LARGEST_ERROR = 1e-2
"""‖ours − PyTorch's‖ / ‖PyTorch's‖ beyond which native code is not trusted; in bf16 it is around
3e-3."""

logger = logging.getLogger(__name__)


_builds_here = False


class NativeUnavailableError(Exception):
    """Native code cannot be had on this machine; the message says why."""


class NoCompilerError(NativeUnavailableError):
    """There is neither a shipped library for this machine nor a C++ compiler."""


def build_here(wanted: bool) -> None:
    """Compile what this process loads from now on, though it be shipped, if ``wanted``; functions
    that are loaded stay as they are."""
    global _builds_here
    _builds_here = wanted


def shipped_library(target: Target) -> Path | None:
    """Return the library that was installed for this kind of processor; None if there is none, or
    code is to be compiled here."""
    library = SHIPPED / f"{target.name}.so"
    return library if library.is_file() and not _builds_here else None


def description() -> str:
    """Say which native code this process uses: the kind of processor, and where it comes from."""
    target = targets.this_target()
    if target is None:
        return "none, for the CPU has neither AVX2 nor NEON"
    if shipped_library(target) is not None:
        return f"{target.name}, shipped"
    compiler, _, _ = compiler_version().partition("\n")
    return f"{target.name}, compiled here by {compiler}" if compiler else "none, for want of g++"


def functions(file: str, arguments: Mapping[str, type[ctypes.Structure]]) -> dict[str, Function]:
    """Return functions of a C++ file of this folder by name, each with the structure that it takes.

    Raises NativeUnavailableError if the file is not shipped and cannot be compiled, and on CPUs of
    no kind that there is native code for.
    """
    target = targets.this_target()
    if target is None:
        raise NativeUnavailableError("the CPU has neither AVX2 nor NEON")
    shipped = shipped_library(target)
    if shipped is None:
        library = load_library(Path(__file__).with_name(file), target)
    else:
        library = _open(shipped)
    found: dict[str, Function] = {}
    for name, argument in arguments.items():
        function = getattr(library, name)
        function.argtypes = [ctypes.POINTER(argument)]
        function.restype = None
        found[name] = function
    return found


def require_close(ours: Tensor, expected: Tensor, what: str) -> None:
    """Compare what native code computed with what PyTorch did. Raises NativeUnavailableError, which
    names ``what`` is wrong, where they differ by more than ``LARGEST_ERROR``."""
    error = float((ours.float() - expected.float()).norm() / expected.float().norm())
    if not error <= LARGEST_ERROR:
        raise NativeUnavailableError(
            f"{what} by native code is wrong on this machine, by {error:.1e}"
        )


def or_fall_back(load: Callable[[], T], consequence: str) -> T | None:
    """Return what ``load`` loads and checks; None if it raises NativeUnavailableError; the log has
    the ``consequence`` and the reason. To be cached by the caller: the compiler is run each
    time. That there is no compiler is logged once, for all that want one."""
    try:
        return load()
    except NoCompilerError as error:
        _advise_compiler(str(error))
        return None
    except NativeUnavailableError as error:
        logger.info("%s: %s.", consequence, error)
        return None


@cache
def _advise_compiler(reason: str) -> None:
    logger.warning(
        "PyTorch's kernels compute all, slower than native code: %s. Install g++, or kvlinker's"
        " wheel for this machine, which has native code in it.",
        reason,
    )


def load_library(source: Path, target: Target) -> ctypes.CDLL:
    """Return the C++ file as a library for this kind of processor, from the cache or compiled now;
    it may include headers from its folder.

    Any number of processes may do so at once. Raises NativeUnavailableError.
    """
    compiler = _compiler()
    try:
        version = _version_of(*compiler)
    except FileNotFoundError as error:
        raise NoCompilerError(f"there is no C++ compiler ({error})") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailableError(_reason(error)) from error
    try:
        sources = [file.read_bytes() for file in (source, *sorted(source.parent.glob("*.h")))]
        options = f"{COMPILE} {target.options}"
        built_from = (options.encode(), shlex.join(compiler).encode(), version, *sources)
        name = f"{source.stem}-{blake3(b'|'.join(built_from)).hexdigest(16)}.so"
        library = _cache() / name
        if not library.is_file():
            _build(compiler, options, source, library)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise NativeUnavailableError(_reason(error)) from error
    return _open(library)


def _open(library: Path) -> ctypes.CDLL:
    """Load a library. Raises NativeUnavailableError."""
    try:
        _share_openmp()
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeUnavailableError(str(error)) from error


@cache
def _share_openmp() -> None:
    """Let libraries find the OpenMP that torch has loaded: some of its builds, such as those for
    ARM, keep it to themselves."""
    if_loaded = getattr(os, "RTLD_NOLOAD", 0)  # another OpenMP beside it would be a second pool
    for library in Path(torch.__file__).with_name("lib").glob("lib[gi]omp*"):
        with suppress(OSError):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL | if_loaded)


def compiler_version() -> str:
    """Return what the compiler says of itself; empty without one."""
    try:
        return _version_of(*_compiler()).decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        return ""


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++"))


@cache
def _version_of(*compiler: str) -> bytes:
    return _run([*compiler, "--version"])


def _build(compiler: list[str], options: str, source: Path, library: Path) -> None:
    """Compile ``source`` with these options, and link it to the file ``library``.

    Linking without OpenMP leaves its functions to be found in the OpenMP that torch has loaded:
    with another one, the waiting threads of both would fight for the cores.
    """
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = Path(folder, "compiled.o"), Path(folder, "linked.so")
        _run([*compiler, *shlex.split(options), "-c", str(source), "-o", str(compiled)])
        _run([*compiler, "-shared", str(compiled), "-o", str(linked)])
        linked.replace(library)


def _run(command: list[str]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=LONGEST_BUILD).stdout


def _cache() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvlinker"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _reason(error: Exception) -> str:
    """Return one line that says what went wrong."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        return (
            f"{error.cmd[0]} failed: {next((line for line in lines if 'error' in line), lines[-1])}"
        )
    return str(error)
