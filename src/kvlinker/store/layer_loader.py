"""Reads chunks from slower tiers layer by layer: a prompt's first layers compute while its last ones are read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from kvlinker.store.bandwidth import Bandwidths
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.layer_stream import ChunkReader, LayerLostError, LayerStream
from kvlinker.store.preloading import preload_depth

THREADS = 2
PATIENCE_SECONDS = 2.0
"""How long a computation waits for one layer that was expected to be there."""

LEAST_DEADLINE_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Urgency:
    """What loading competes with, in seconds: ``compute``, the computation that hides it; ``prefill``, computing the
    chunks instead of loading them."""

    compute: float
    prefill: float


@dataclass(slots=True, eq=False)
class Opened:
    """A chunk in a slower tier, about to be read. ``loaded`` is told when all of its layers are there."""

    tier: str
    reader: ChunkReader
    loaded: Callable[[ChunkKV, float], None]
    stream: LayerStream = field(init=False)
    future: Future[ChunkKV | None] = field(init=False, default_factory=Future)

    def __post_init__(self) -> None:
        self.stream = LayerStream(self.reader.layers, patience=PATIENCE_SECONDS)


class LayerLoader:
    """A few threads that read. All chunks of a prompt advance together: layer i of each before layer i + 1 of any."""

    def __init__(self, bandwidths: Bandwidths) -> None:
        self.bandwidths = bandwidths
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kvlinker-layers")

    def worth_loading(self, tier: str, nbytes: int, urgency: Urgency) -> bool:
        """Whether reading is expected to take no longer than computing would; yes where that is not known."""
        rate = self.bandwidths.of(tier)
        return rate is None or not self.bandwidths.fresh(tier) or nbytes / rate <= max(urgency.prefill, 1e-3)

    def load(self, opened: Sequence[Opened], urgency: Urgency) -> None:
        """Read the chunks of one prompt. Each one's ``future`` has its KV once enough layers are there to begin with,
        or None when it is lost, or late: computing it would be done by then."""
        job = _Job(tuple(opened), urgency, self.bandwidths)
        watch = threading.Timer(max(urgency.prefill, LEAST_DEADLINE_SECONDS), job.give_up)
        watch.daemon = True
        watch.start()
        self._pool.submit(job.run).add_done_callback(lambda _: watch.cancel())

    def close(self) -> None:
        """Let what is being read end. Idempotent."""
        self._pool.shutdown(cancel_futures=True)


class _Job:
    """One prompt's chunks, read by one thread."""

    def __init__(self, opened: tuple[Opened, ...], urgency: Urgency, bandwidths: Bandwidths) -> None:
        self._opened = opened
        self._urgency = urgency
        self._bandwidths = bandwidths

    def run(self) -> None:
        left = list(self._opened)
        layers = max((one.reader.layers for one in left), default=0)
        depth = preload_depth(layers, compute_seconds=self._urgency.compute, load_seconds=self._expected_seconds())
        spent = dict.fromkeys(left, 0.0)
        try:
            for layer in range(layers):
                for one in list(left):
                    begin = time.perf_counter()
                    if not self._read(one, layer):
                        left.remove(one)
                        continue
                    spent[one] += time.perf_counter() - begin
                    if layer + 1 >= min(depth, one.reader.layers):
                        self._resolve(one, ChunkKV(one.stream, one.reader.scores))
                    if layer + 1 == one.reader.layers:
                        left.remove(one)
                        self._finish(one, spent[one])
        finally:
            for one in self._opened:
                one.reader.close()
                if one.stream.delivered < len(one.stream):
                    one.stream.lose()
                self._resolve(one, None)

    def give_up(self) -> None:
        """Too late for those that cannot begin yet."""
        for one in self._opened:
            self._resolve(one, None)

    def _read(self, one: Opened, layer: int) -> bool:
        if one.stream.lost:
            return False
        try:
            one.stream.deliver(one.reader.read(layer))
        except LayerLostError:
            one.stream.lose()
            self._resolve(one, None)
            return False
        return True

    def _finish(self, one: Opened, seconds: float) -> None:
        self._bandwidths.note(one.tier, one.reader.nbytes, seconds)
        one.loaded(ChunkKV(tuple(one.stream), one.reader.scores), seconds)

    def _expected_seconds(self) -> float:
        rates = [(one.reader.nbytes, self._bandwidths.of(one.tier)) for one in self._opened]
        return sum(nbytes / rate for nbytes, rate in rates if rate)

    @staticmethod
    def _resolve(one: Opened, kv: ChunkKV | None) -> None:
        with suppress(InvalidStateError):  # somebody else was quicker
            one.future.set_result(kv)
