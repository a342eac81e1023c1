"""One prompt's chunks on their way in from slower tiers; the layer loader is its only caller."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.loading.bandwidth import Bandwidths, LoadTime
from kvlinker.store.loading.joined_reader import JoinedReader, UnderWay
from kvlinker.store.loading.layer_stream import ChunkReader, HeldReader, LayerLostError, LayerStream
from kvlinker.store.loading.reader_threads import ReaderThreads
from kvlinker.store.loading.wanted import Loaded, Opened, Urgency, Wanted, preload_depth

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 2.0
"""How long a computation waits for one layer that was expected to be there."""

STALL_SECONDS = 5.0
"""A single read that takes longer, with the deadline past, hangs."""

LEAST_DEADLINE_SECONDS = 0.25
MOST_DEADLINE_SECONDS = 10.0
"""A prompt whose chunks cannot begin to be placed after this time computes them, whatever that takes."""


class LoadJob:
    """Deals the chunks out to several threads. Those that cannot be placed by the time in which they could have been
    computed are given up; a thread that then hangs in a read is left to itself."""

    def __init__(
        self,
        wanted: Sequence[Wanted],
        urgency: Urgency,
        threads: ReaderThreads,
        bandwidths: Bandwidths,
        under_way: UnderWay,
        closing: threading.Event,
        *,
        parts: int,
    ) -> None:
        self.urgency = urgency
        self.bandwidths = bandwidths
        self.under_way = under_way
        self.closing = closing
        self.given_up = False
        self._threads = threads
        self._lock = threading.Lock()
        self._parts = tuple(_Part(wanted[first::parts], self) for first in range(min(parts, len(wanted))))
        self._running = set(self._parts)  # not ended
        self._watch: threading.Timer | None = None

    def start(self) -> None:
        self._watch_in(min(max(self.urgency.prefill, LEAST_DEADLINE_SECONDS), MOST_DEADLINE_SECONDS), self._give_up)
        for part in self._parts:
            self._threads.submit(part)

    def late(self) -> None:
        """Somebody waited in vain: for the other chunks nobody shall wait again."""
        for part in self._parts:
            part.lose()

    def ended(self, part: _Part) -> None:
        """The part's thread has done, or hangs; only the first call counts."""
        with self._lock:
            if part not in self._running:
                return
            self._running.discard(part)
            if self._running:
                return
            if self._watch is not None:
                self._watch.cancel()
        self._note_bandwidths()

    def _give_up(self) -> None:
        """Too late for those that cannot begin yet."""
        self.given_up = True
        for part in self._parts:
            part.give_up()
        self._leave_hanging()

    def _leave_hanging(self) -> None:
        """Give up the parts whose threads hang, and look again later, as long as there are others."""
        with self._lock:
            running = tuple(self._running)
        for part in running:
            if part.stalls:
                self._threads.abandon(part)
                part.forsake()
                self.ended(part)
        self._watch_in(STALL_SECONDS, self._leave_hanging)

    def _watch_in(self, seconds: float, look: Callable[[], None]) -> None:
        with self._lock:
            if self._running:
                self._watch = threading.Timer(seconds, look)
                self._watch.daemon = True
                self._watch.start()

    def _note_bandwidths(self) -> None:
        """Of each tier, by the thread that took longest."""
        found = [[reading for reading in part.readings if not reading.joined] for part in self._parts]
        for tier in {reading.tier for readings in found for reading in readings}:
            of_tier = [[reading for reading in readings if reading.tier == tier] for readings in found]
            nbytes = sum(reading.nbytes for readings in of_tier for reading in readings)
            times = [sum((reading.time for reading in readings), LoadTime()) for readings in of_tier]
            longest = max(times, key=lambda time: time.seconds)
            self.bandwidths.note(tier, nbytes, longest.seconds, longest.busy)


class _Reading:
    """One chunk on its way in."""

    def __init__(self, wanted: Wanted, opened: Opened, late: Callable[[], None], taken: LoadTime) -> None:
        self.wanted = wanted
        self.tier = opened.tier
        self.reader = opened.reader
        self.stream = LayerStream(opened.reader.layers, patience=PATIENCE_SECONDS, late=late)
        self.time = taken
        self._closed = False

    @property
    def joined(self) -> bool:
        """Another request's thread reads it."""
        return isinstance(self.reader, JoinedReader)

    @property
    def complete(self) -> bool:
        return self.stream.delivered == len(self.stream)

    def advance(self) -> bool:
        """Read the next layer; False where there is none to be had."""
        if self.stream.lost:
            return False
        begin = _now()
        try:
            return self.stream.deliver(self.reader.read(self.stream.delivered))
        except LayerLostError:
            return False
        except Exception:
            logger.exception("A chunk could not be read from tier %s.", self.tier)
            return False
        finally:
            self.time += _since(begin)

    def close(self) -> None:
        """By the thread that reads, when nothing more is to be had. Idempotent."""
        self.stream.lose()
        if not self._closed:
            self._closed = True
            self.reader.close()

    @property
    def nbytes(self) -> int:
        """That were read so far."""
        return self.reader.nbytes * self.stream.delivered // len(self.stream)


class _Part:
    """Those of a prompt's chunks that one thread reads; the ``Task`` of that thread."""

    def __init__(self, wanted: Sequence[Wanted], job: LoadJob) -> None:
        self._wanted = wanted
        self._job = job
        self._lock = threading.Lock()
        self._readings: list[_Reading] = []  # guarded by _lock
        self._left = set(wanted)  # whose end nobody was told; guarded by _lock
        self._forsaken = False
        self._reading_since: float | None = None

    @property
    def readings(self) -> tuple[_Reading, ...]:
        with self._lock:
            return tuple(self._readings)

    @property
    def stalls(self) -> bool:
        """A single read takes suspiciously long."""
        since = self._reading_since
        return since is not None and time.monotonic() - since > STALL_SECONDS

    def run(self) -> None:
        for wanted in self._wanted:
            self._open(wanted)
        readings = self.readings
        left = sorted(readings, key=lambda reading: reading.joined)  # those that others wait for come first
        while left:
            for reading in list(left):
                with self._timed():
                    advanced = reading.advance()
                if not advanced:
                    left.remove(reading)
                    self._close(reading)
                    reading.wanted.resolve(None)
                elif reading.complete:
                    left.remove(reading)
                    kv = ChunkKV(tuple(reading.stream), reading.reader.scores)
                    self._tell(reading.wanted, Loaded(reading.tier, kv, reading.time.seconds))
                    self._close(reading)
            if self._job.closing.is_set():
                return
            depth = self._depth(readings)
            for reading in readings:
                if reading.stream.delivered >= min(depth, len(reading.stream)):
                    reading.wanted.resolve(ChunkKV(reading.stream, reading.reader.scores))

    def end(self) -> None:
        for reading in self.readings:
            self._close(reading)
        self.forsake()
        self._job.ended(self)

    def forsake(self) -> None:
        """Whatever is missing will not come, whether the thread ends or not."""
        self._forsaken = True
        self.lose()
        for wanted in self._wanted:
            wanted.resolve(None)
            self._tell(wanted, None)

    def lose(self) -> None:
        """Nobody waits for what is missing."""
        for reading in self.readings:
            reading.stream.lose()

    def give_up(self) -> None:
        """What cannot be placed by now will not be."""
        for wanted in self._wanted:
            wanted.resolve(None)
        for reading in self.readings:
            if reading.wanted.future.result() is None:
                reading.stream.lose()

    def _open(self, wanted: Wanted) -> None:
        if self._job.given_up or self._job.closing.is_set() or self._forsaken:
            return
        begin = _now()
        with self._timed():
            opened = self._job.under_way.join(wanted.key, lambda: _reopened(wanted), patience=PATIENCE_SECONDS)
            found = opened or wanted.open()
        if isinstance(found, Loaded):
            wanted.resolve(found.kv)
            self._tell(wanted, found)
        elif found is None:
            wanted.resolve(None)
        else:
            reading = _Reading(wanted, found, self._job.late, _since(begin))
            with self._lock:
                self._readings.append(reading)
            if self._forsaken:
                reading.stream.lose()
            elif not reading.joined:
                self._job.under_way.begin(wanted.key, reading.stream, found)

    def _close(self, reading: _Reading) -> None:
        self._job.under_way.end(reading.wanted.key, reading.stream)
        reading.close()

    def _tell(self, wanted: Wanted, loaded: Loaded | None) -> None:
        with self._lock:
            if wanted not in self._left:
                return
            self._left.discard(wanted)
        try:
            wanted.ended(loaded)
        except Exception:
            logger.exception("What follows the loading of a chunk failed.")

    @contextmanager
    def _timed(self) -> Iterator[None]:
        self._reading_since = time.monotonic()
        try:
            yield
        finally:
            self._reading_since = None

    def _depth(self, readings: Sequence[_Reading]) -> int:
        """Layers that have to be there before a chunk is placed: all of them where a tier was never measured, or where
        reading takes the computation's processors rather than waits, so that the computation would hide nothing."""
        layers = max((reading.reader.layers for reading in readings), default=0)
        so_far = sum((reading.time for reading in readings), LoadTime())
        if self._job.urgency.shares_processors and not so_far.waits:
            return layers
        rates = [(reading.reader.nbytes, self._job.bandwidths.of(reading.tier)) for reading in readings]
        if any(rate is None for _, rate in rates):
            return layers
        expected = sum(nbytes / rate for nbytes, rate in rates if rate)
        return preload_depth(layers, compute_seconds=self._job.urgency.compute, load_seconds=expected)


def _now() -> LoadTime:
    """This thread's clocks."""
    return LoadTime(time.perf_counter(), time.thread_time())


def _since(begin: LoadTime) -> LoadTime:
    now = _now()
    return LoadTime(now.seconds - begin.seconds, now.busy - begin.busy)


def _reopened(wanted: Wanted) -> ChunkReader | None:
    """A copy to be read after all, or what has come to memory meanwhile."""
    found = wanted.open()
    if isinstance(found, Loaded):
        return HeldReader(found.kv)
    return None if found is None else found.reader
