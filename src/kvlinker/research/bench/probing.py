"""Measuring how fast a tier delivers, with samples."""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from secrets import token_hex

import torch

from kvlinker.research.bench.store.files import chunk_files, drop_from_page_cache
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.loading.bandwidth import LoadTime
from kvlinker.store.loading.layer_loader import LayerLoader
from kvlinker.store.loading.wanted import Loaded, Opened, Urgency, Wanted
from kvlinker.store.tiers.base import Tier
from kvlinker.store.tiers.disk import DiskTier

ROUNDS = 3

_LOOK_SECONDS = 0.05


class ProbeFailedError(Exception):
    """A tier did not take the samples, or not give them back; the message says what happened."""


class ProbeStoppedError(Exception):
    """Somebody wants no more of it."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """``nbytes`` as stored of all samples, and the median time that reading them takes."""

    nbytes: int
    time: LoadTime


def measure_tier(
    tier: Tier, samples: Sequence[ChunkKV], stop: threading.Event, progress: Callable[[int], None] = lambda _: None
) -> Delivery:
    """Write the samples, and load them as those of a prompt are; a disk's page cache is emptied of them before. The
    caller removes them.

    ``progress`` is told the round, from 0 (writing) on. Raises ProbeFailedError, and ProbeStoppedError soon after
    ``stop`` is set: never while a call to the tier is under way.
    """
    keys = [token_hex(32) for _ in samples]
    progress(0)
    for key, kv in zip(keys, samples, strict=True):
        if stop.is_set():
            raise ProbeStoppedError
        if not tier.put(key, kv):
            raise ProbeFailedError("it did not take the samples: it is full, read-only, or does not answer")
    nbytes = sum(tier.nbytes(key) or 0 for key in keys)
    times = []
    for number in range(1, ROUNDS + 1):
        progress(number)
        if isinstance(tier, DiskTier):
            drop_from_page_cache(chunk_files(tier.directory))
        times.append(_load(tier, keys, nbytes, stop))
    return Delivery(nbytes, _median(times))


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
    return Delivery(sum(kv.nbytes for kv in samples), LoadTime(statistics.median(seconds)))


def _load(tier: Tier, keys: Sequence[str], nbytes: int, stop: threading.Event) -> LoadTime:
    ended: queue.SimpleQueue[Loaded | None] = queue.SimpleQueue()

    def opened(key: str) -> Opened | None:
        reader = tier.open(key)
        return None if reader is None else Opened(tier.name, reader)

    loader = LayerLoader()
    try:
        loader.load([Wanted(key, partial(opened, key), ended.put) for key in keys], Urgency())
        for _ in keys:
            _await(ended, stop)
    finally:
        loader.close()
    taken = loader.bandwidths.time(tier.name, nbytes)
    if taken is None:
        raise ProbeFailedError("the samples were gone, or damaged, when they were to be read")
    return taken


def _await(ended: queue.SimpleQueue[Loaded | None], stop: threading.Event) -> None:
    while not stop.is_set():
        with suppress(queue.Empty):
            ended.get(timeout=_LOOK_SECONDS)
            return
    raise ProbeStoppedError


def _median(times: Sequence[LoadTime]) -> LoadTime:
    return sorted(times, key=lambda time: time.seconds)[len(times) // 2]
