"""Reads chunks from slower tiers layer by layer: a prompt's first layers compute while its last ones are read."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from kvlinker.store.bandwidth import Bandwidths
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.layer_stream import ChunkReader, LayerLostError, LayerStream
from kvlinker.store.preloading import preload_depth

logger = logging.getLogger(__name__)

THREADS = 2
BUSY_SHARE = 0.5
"""Of the time that reading takes: beyond it, reading keeps a processor busy rather than waits."""

PATIENCE_SECONDS = 2.0
"""How long a computation waits for one layer that was expected to be there."""

LEAST_DEADLINE_SECONDS = 0.25
MOST_DEADLINE_SECONDS = 10.0
"""A prompt whose chunks cannot begin to be placed after this time computes them, whatever that takes."""


@dataclass(frozen=True, slots=True)
class Urgency:
    """What loading competes with, in seconds: ``compute``, the computation that hides it; ``prefill``, computing the
    chunks instead of loading them. ``shares_processors``: the computation runs where reading does, and hides only what
    reading waits. As it stands: nothing hides it, and nothing is known to be quicker."""

    compute: float = 0.0
    prefill: float = math.inf
    shares_processors: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """A copy of a chunk in the tier of this name."""

    tier: str
    reader: ChunkReader


@dataclass(frozen=True, slots=True)
class Loaded:
    """A chunk whose layers are all there, after ``seconds`` of reading."""

    tier: str
    kv: ChunkKV
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A chunk that is believed to lie in a slower tier.

    ``open`` finds a copy, or none. ``ended`` is told once, when all is read, or with None, when it will not be.
    ``future`` has the KV once enough layers are there to begin with, or None when it is lost, or late.
    """

    open: Callable[[], Opened | None]
    ended: Callable[[Loaded | None], None]
    future: Future[ChunkKV | None] = field(default_factory=Future)

    def resolve(self, kv: ChunkKV | None) -> None:
        """Unless somebody did before."""
        with suppress(InvalidStateError):
            self.future.set_result(kv)


class LayerLoader:
    """A few threads that read. The chunks of a prompt are dealt out among them, and advance together: each thread reads
    layer i of all its chunks before layer i + 1 of any."""

    def __init__(self) -> None:
        self.bandwidths = Bandwidths()
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kvlinker-layers")

    def worth_loading(self, tier: str, nbytes: int, urgency: Urgency) -> bool:
        """Whether reading is expected to take no longer than computing would; yes where that is not known."""
        rate = self.bandwidths.of(tier)
        return rate is None or not self.bandwidths.fresh(tier) or nbytes / rate <= max(urgency.prefill, 1e-3)

    def load(self, wanted: Sequence[Wanted], urgency: Urgency) -> None:
        """Begin to read the chunks of one prompt. Those that cannot be placed by the time in which they could have
        been computed are given up."""
        job = _Job(wanted, urgency, self.bandwidths, self._closing)
        seconds = min(max(urgency.prefill, LEAST_DEADLINE_SECONDS), MOST_DEADLINE_SECONDS)
        watch = threading.Timer(seconds, job.give_up)
        watch.daemon = True
        watch.start()

        def ended(part: _Part, _: Future[None] | None = None) -> None:
            if job.ended(part):
                watch.cancel()

        for part in job.parts:
            try:
                running = self._pool.submit(part.run)
            except RuntimeError:  # closed
                ended(part)
            else:
                running.add_done_callback(partial(ended, part))

    def close(self) -> None:
        """Read no further; what is not there by now is lost. Idempotent."""
        self._closing.set()
        self._pool.shutdown(cancel_futures=True)


class _Reading:
    """One chunk on its way in."""

    def __init__(self, wanted: Wanted, opened: Opened, late: Callable[[], None]) -> None:
        self.wanted = wanted
        self.tier = opened.tier
        self.reader = opened.reader
        self.stream = LayerStream(opened.reader.layers, patience=PATIENCE_SECONDS, late=late)
        self.seconds = 0.0

    @property
    def complete(self) -> bool:
        return self.stream.delivered == len(self.stream)

    def advance(self) -> bool:
        """Read the next layer; False where there is none to be had."""
        if self.stream.lost:
            return False
        begin = time.perf_counter()
        try:
            return self.stream.deliver(self.reader.read(self.stream.delivered))
        except LayerLostError:
            return False
        except Exception:
            logger.exception("A chunk could not be read from tier %s.", self.tier)
            return False
        finally:
            self.seconds += time.perf_counter() - begin

    @property
    def nbytes(self) -> int:
        """That were read so far."""
        return self.reader.nbytes * self.stream.delivered // len(self.stream)


class _Part:
    """Those of a prompt's chunks that one thread reads."""

    def __init__(self, wanted: Sequence[Wanted], job: _Job) -> None:
        self.wanted = wanted
        self.readings: list[_Reading] = []
        self._job = job
        self._left = set(wanted)  # whose end nobody was told
        self._busy_seconds = 0.0

    def run(self) -> None:
        began = time.thread_time()
        for wanted in self.wanted:
            self._open(wanted)
        left = list(self.readings)
        while left:
            for reading in list(left):
                if not reading.advance():
                    left.remove(reading)
                    reading.stream.lose()
                    reading.wanted.resolve(None)
                elif reading.complete:
                    left.remove(reading)
                    kv = ChunkKV(tuple(reading.stream), reading.reader.scores)
                    self._end(reading.wanted, Loaded(reading.tier, kv, reading.seconds))
            if self._job.closing.is_set():
                return
            self._busy_seconds = time.thread_time() - began
            depth = self._depth()
            for reading in self.readings:
                if reading.stream.delivered >= min(depth, len(reading.stream)):
                    reading.wanted.resolve(ChunkKV(reading.stream, reading.reader.scores))

    def end(self) -> None:
        """After ``run``, or in its place: whatever is missing will not come."""
        for reading in self.readings:
            reading.reader.close()
            reading.stream.lose()
        for wanted in self.wanted:
            wanted.resolve(None)
            if wanted in self._left:
                self._end(wanted, None)

    def _open(self, wanted: Wanted) -> None:
        if self._job.given_up or self._job.closing.is_set():
            return
        begin = time.perf_counter()
        opened = wanted.open()
        if opened is None:
            wanted.resolve(None)
            return
        reading = _Reading(wanted, opened, self._job.late)
        reading.seconds = time.perf_counter() - begin
        self._job.add(self, reading)

    def _end(self, wanted: Wanted, loaded: Loaded | None) -> None:
        self._left.discard(wanted)
        try:
            wanted.ended(loaded)
        except Exception:
            logger.exception("What follows the loading of a chunk failed.")

    def _depth(self) -> int:
        """Layers that have to be there before a chunk is placed: all of them where a tier was never measured, or where
        reading takes the computation's processors rather than waits, so that the computation would hide nothing."""
        layers = max((reading.reader.layers for reading in self.readings), default=0)
        seconds = sum(reading.seconds for reading in self.readings)
        if self._job.urgency.shares_processors and self._busy_seconds > BUSY_SHARE * seconds:
            return layers
        rates = [(reading.reader.nbytes, self._job.bandwidths.of(reading.tier)) for reading in self.readings]
        if any(rate is None for _, rate in rates):
            return layers
        expected = sum(nbytes / rate for nbytes, rate in rates if rate)
        return preload_depth(layers, compute_seconds=self._job.urgency.compute, load_seconds=expected)


class _Job:
    """One prompt's chunks, dealt out to several threads."""

    def __init__(
        self, wanted: Sequence[Wanted], urgency: Urgency, bandwidths: Bandwidths, closing: threading.Event
    ) -> None:
        self.urgency = urgency
        self.bandwidths = bandwidths
        self.parts = tuple(_Part(wanted[first::THREADS], self) for first in range(min(THREADS, len(wanted))))
        self.closing = closing
        self.given_up = False
        self._lock = threading.Lock()
        self._running = set(self.parts)

    def add(self, part: _Part, reading: _Reading) -> None:
        with self._lock:
            part.readings.append(reading)

    def late(self) -> None:
        """Somebody waited in vain: for the other chunks nobody shall wait again."""
        for reading in self._readings():
            reading.stream.lose()

    def give_up(self) -> None:
        """Too late for those that cannot begin yet."""
        with self._lock:
            self.given_up = True
        for part in self.parts:
            for wanted in part.wanted:
                wanted.resolve(None)
        for reading in self._readings():
            if reading.wanted.future.result() is None:
                reading.stream.lose()

    def ended(self, part: _Part) -> bool:
        """Whether that was the last part."""
        part.end()
        with self._lock:
            self._running.discard(part)
            if self._running:
                return False
        self._note_bandwidths()
        return True

    def _readings(self) -> list[_Reading]:
        with self._lock:
            return [reading for part in self.parts for reading in part.readings]

    def _note_bandwidths(self) -> None:
        """Of each tier, by the thread that took longest."""
        for tier in {reading.tier for reading in self._readings()}:
            of_tier = [[reading for reading in part.readings if reading.tier == tier] for part in self.parts]
            nbytes = sum(reading.nbytes for readings in of_tier for reading in readings)
            seconds = max(sum(reading.seconds for reading in readings) for readings in of_tier)
            self.bandwidths.note(tier, nbytes, seconds)
