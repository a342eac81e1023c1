"""Measures the peak computation and bandwidth of this processor, by ``native/peaks.cpp``, to
compare kernels with."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from functools import cache

import torch

from kvlinker.engines import native

STEPS = 2_000_000
"""The steps of the products of each thread: a few tens of milliseconds."""

READ_BYTES = 1 << 28
"""The bytes that are read: more than any cache holds."""

REPEAT = 9


@dataclass(frozen=True, slots=True)
class Peaks:
    """The rates that all threads of PyTorch reach together."""

    operations_per_s: float
    """The rate of products of numbers in bf16, as kernels multiply them here, in registers
    alone."""

    byte_operations_per_s: float
    """The rate of products of integers of 8 bits."""

    bytes_per_s: float
    """The rate of reading memory once."""


@cache
def peaks() -> Peaks | None:
    """Measure the peaks, once; None if there is no native code for this processor, and the log says
    why."""
    return native.or_fall_back(_measure, "The processor's peaks are PyTorch's")


def _measure() -> Peaks:
    names = [f"kvlinker_peak_{what}" for what in ("products", "bytes", "reading")]
    functions = native.functions("peaks.cpp", dict.fromkeys(names, _Peak))
    threads = torch.get_num_threads()
    numbers, sums = torch.rand(READ_BYTES // 4), torch.empty(threads)
    count = len(numbers) // (1024 * threads) * 1024 * threads
    peak = _Peak(threads, STEPS, numbers.data_ptr(), count, sums.data_ptr())
    seconds, operations = {}, {}
    for name in names:
        seconds[name] = _fewest_seconds(functions[name], peak)
        operations[name] = threads * STEPS * peak.operations / seconds[name]
    products, of_bytes, reading = names
    return Peaks(operations[products], operations[of_bytes], 4 * count / seconds[reading])


def _fewest_seconds(function: native.Function, peak: _Peak) -> float:
    """Return the time of the round that others on this machine disturbed least."""
    taken = []
    for _ in range(REPEAT):
        begin = time.perf_counter()
        function(peak)
        taken.append(time.perf_counter() - begin)
    return min(taken)


class _Peak(ctypes.Structure):
    """Describes what is computed or read: ``Peak`` of peaks.cpp."""

    _fields_ = (
        ("threads", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("numbers", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("sums", ctypes.c_void_p),
        ("operations", ctypes.c_int64),
    )
