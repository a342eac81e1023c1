"""Measuring how fast a tier delivers, with samples."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import torch

from kvlinker.store.base import Tier
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.disk import DiskTier
from kvlinker.store.layer_stream import LayerLostError

ROUNDS = 3


class ProbeFailedError(Exception):
    """A tier did not take the samples, or not give them back; the message says what happened."""


class ProbeStoppedError(Exception):
    """Somebody wants no more of it."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """``nbytes`` as stored of all samples, and the median ``seconds`` that reading them takes."""

    nbytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.nbytes / self.seconds


def measure_tier(
    tier: Tier, samples: Sequence[ChunkKV], stop: threading.Event, progress: Callable[[int], None] = lambda _: None
) -> Delivery:
    """Write the samples, and read them layer by layer, all in step, as loading a prompt does; a disk's page cache is
    emptied of them before. The caller removes them.

    ``progress`` is told the round, from 0 (writing) on. Raises ProbeFailedError, and ProbeStoppedError soon after
    ``stop`` is set: never while a call to the tier is under way.
    """
    keys = [token_hex(32) for _ in samples]
    progress(0)
    for key, kv in zip(keys, samples, strict=True):
        _check(stop)
        if not tier.put(key, kv):
            raise ProbeFailedError("it did not take the samples: it is full, read-only, or does not answer")
    nbytes = sum(tier.nbytes(key) or 0 for key in keys)
    seconds = []
    for number in range(1, ROUNDS + 1):
        progress(number)
        if isinstance(tier, DiskTier):
            _empty_page_cache(tier.directory)
        seconds.append(_read(tier, keys, stop))
    return Delivery(nbytes, statistics.median(seconds))


def measure_memory(samples: Sequence[ChunkKV], device: torch.device) -> Delivery:
    """Copying the samples from host memory to the ``device``, layer by layer."""
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for layers in zip(*(kv.layers for kv in samples), strict=True):
            for layer in layers:
                layer.key.to(device, copy=True)
                layer.value.to(device, copy=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return Delivery(sum(kv.nbytes for kv in samples), statistics.median(seconds))


def _read(tier: Tier, keys: Sequence[str], stop: threading.Event) -> float:
    begin = time.perf_counter()
    with ExitStack() as stack:
        readers = []
        for key in keys:
            _check(stop)
            reader = tier.open(key)
            if reader is None:
                raise ProbeFailedError("a sample was gone, or not to be read, when it was wanted")
            stack.callback(reader.close)
            readers.append(reader)
        try:
            for layer in range(max(reader.layers for reader in readers)):
                for reader in readers:
                    _check(stop)
                    reader.read(layer)
        except LayerLostError as error:
            raise ProbeFailedError(f"a sample could not be read: {error}") from error
    return time.perf_counter() - begin


def _check(stop: threading.Event) -> None:
    if stop.is_set():
        raise ProbeStoppedError


def _empty_page_cache(folder: Path) -> None:
    """Of the files in the folder, which are on the disk already; where the system knows how."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
