"""Native code for processors of another kind, which an emulator runs on copies of this process's
memory."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tools.native_libraries import make_library

from kvlinker.engines import native
from kvlinker.engines.native.targets import Target
from tests.engines.native.native_targets import passing_for

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSTEM = "/usr/aarch64-linux-gnu"
"""The folder with the C library that comes with the compiler."""
FRAMES = 4
"""The callers in whose variables arrays are looked for."""


@dataclass(frozen=True)
class Memory:
    """A piece of this process's memory."""

    address: int
    size: int
    holds_pointers: bool

    @property
    def bytes(self) -> Any:
        return (ctypes.c_char * self.size).from_address(self.address)


def build(target: Target, folder: Path) -> list[str]:
    """Return the command that calls functions of the library that wheels have for this kind of
    processor. ``make dist`` says where it has made it; otherwise it is made here."""
    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    caller = folder / "caller"
    source = Path(__file__).with_name("emulated_call.cpp")
    # As in a process with torch, OpenMP is loaded before the library.
    options = ["-std=c++17", "-O2", "-fopenmp", "-Wl,--no-as-needed", "-lgomp"]
    subprocess.run([COMPILER, *options, str(source), "-o", str(caller)], check=True)
    made = os.environ.get("KVLINKER_LIBRARIES")
    library = (
        Path(made, f"{target.name}.so").resolve()
        if made
        else make_library([COMPILER], target, folder)
    )
    return [EMULATOR, "-cpu", "max", "-L", SYSTEM, str(caller), str(library)]


@contextmanager
def emulated(caller: list[str], target: Target) -> Iterator[None]:
    """Have the functions of native code run in the emulator for a while."""

    def functions(file: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {name: EmulatedFunction(caller, name) for name in arguments}

    with passing_for(target), pytest.MonkeyPatch.context() as patched:
        patched.setattr(native, "functions", functions)
        yield


class EmulatedFunction:
    """One function; it finds the memory that its argument points to among the tensors that there
    are and the arrays of its callers."""

    def __init__(self, caller: list[str], name: str) -> None:
        self._caller = caller
        self._name = name

    def __call__(self, argument: ctypes.Structure) -> None:
        whole = Memory(ctypes.addressof(argument), ctypes.sizeof(argument), True)
        known = sorted({whole, *_tensors(), *_arrays()}, key=lambda memory: memory.address)
        addresses = [memory.address for memory in known]
        buffers, pointers = [whole], []
        for index, memory in enumerate(buffers):  # grows meanwhile
            if not memory.holds_pointers:
                continue
            words = np.frombuffer(memory.bytes, np.int64, memory.size // 8).tolist()
            for position, word in enumerate(words):
                at = bisect_right(addresses, word) - 1
                if at < 0 or word >= known[at].address + known[at].size:
                    continue
                if known[at] not in buffers:
                    buffers.append(known[at])
                target = buffers.index(known[at])
                pointers.append((index, 8 * position, target, word - known[at].address))
        file = Path(self._caller[-2]).with_suffix(".memory")
        header = [len(buffers), len(pointers), *(memory.size for memory in buffers)]
        with file.open("wb") as to:
            to.write(np.array(header, np.int64).tobytes())
            to.write(np.array(pointers, np.int64).tobytes())
            begin = to.tell()
            for memory in buffers:
                to.write(memory.bytes)
        subprocess.run([*self._caller, self._name, str(file)], check=True, timeout=60)
        with file.open("rb") as computed:
            computed.seek(begin)
            for memory in buffers:
                found = computed.read(memory.size)
                if not memory.holds_pointers:
                    ctypes.memmove(memory.address, found, memory.size)


def _tensors() -> Iterator[Memory]:
    for found in gc.get_objects():
        if not isinstance(found, torch.Tensor) or not found.is_cpu or not found.numel():
            continue
        if found.layout is torch.strided:  # oneDNN's own have no memory that can be asked for
            storage = found.untyped_storage()
            yield Memory(storage.data_ptr(), storage.nbytes(), False)


def _arrays() -> Iterator[Memory]:
    frame: Any = sys._getframe(2)
    values: list[Any] = []
    for _ in range(FRAMES):
        values += frame.f_locals.values()
        frame = frame.f_back
    for value in chain.from_iterable(map(_with_held, values)):
        if isinstance(value, np.ndarray) and value.nbytes:
            yield Memory(value.ctypes.data, value.nbytes, value.dtype == np.int64)
        elif isinstance(value, ctypes.Array):
            yield Memory(ctypes.addressof(value), ctypes.sizeof(value), True)


def _with_held(value: Any) -> Iterator[Any]:
    """A value, and whatever it holds the memory of."""
    yield value
    for name in ("held", "_held"):
        for each in getattr(value, name, ()):
            yield from _with_held(each)
