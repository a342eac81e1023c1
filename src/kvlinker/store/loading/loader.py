"""Reads chunks from slower tiers layer by layer: a prompt's first layers compute while its last
ones are read.

A few threads read, a layer at a time: the oldest prompt first, and of its chunks the one of which
least has been read, so that a prompt's chunks advance in step. A chunk that several prompts want is
read once; each of them gets an ``ArrivingKV`` of its own.

One watch ends late reads. A prompt past its deadline cancels the chunks that it waits for. A read
that does not return is left to itself: its chunk is lost to all who want it, and another thread
takes its thread's place.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from kvlinker.base.threads import compute_serially
from kvlinker.store.loading.bandwidths import Bandwidths, TimedRead
from kvlinker.store.loading.prompt_load import ChunkLoad, PromptLoad, Urgency
from kvlinker.store.loading.reading import ChunkRead, Form, Found, ReadLayer, ReadTurn

logger = logging.getLogger(__name__)

THREADS = 2
"""The threads that read slower tiers; chosen by hand."""

STALL_SECONDS = 5.0
"""The seconds after which a single read counts as hanging; chosen by hand."""

WATCH_SECONDS = 0.02
"""The seconds between two looks of the watch; chosen by hand."""

MOST_ABANDONED = 8
"""The most threads that may hang and are replaced; after that, no further one is; chosen by
hand."""

CLOSE_SECONDS = 5.0
"""The seconds that closing waits for reads under way; reads that hang do not hold up the process's
end; chosen by hand."""


class LayerLoader:
    """Owns the chunks that are being read, and the threads for them: as long as there is something
    to read, those that read, and the watch. Any thread may call the methods."""

    def __init__(
        self,
        bandwidths: Bandwidths | None = None,
        forms: Callable[[int], Form] = lambda layers: lambda _, layer: layer,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Note in ``bandwidths`` how fast tiers deliver. ``forms`` takes a chunk's number of
        layers, and returns the function that converts each layer to the form in which it is
        delivered. ``clock`` measures delays."""
        self.bandwidths = bandwidths or Bandwidths()
        self._forms = forms
        self._clock = clock
        self._lock = threading.Lock()  # guards all that follows
        self._readings: dict[str, ChunkRead] = {}
        self._prompts: set[PromptLoad] = set()
        self._reads: defaultdict[str, list[TimedRead]] = defaultdict(list)  # by tier, not yet noted
        self._turns = itertools.count()
        self._threads: set[threading.Thread] = set()
        self._abandoned: set[threading.Thread] = set()
        self._watch: threading.Thread | None = None
        self._closed = False

    def load(self, chunks: Sequence[ChunkLoad], urgency: Urgency, *, ahead: bool = False) -> None:
        """Begin to read the chunks of one prompt; each of their futures will be resolved. Chunks
        that are loaded ``ahead`` come after all others, and leave a thread free for these."""
        prompt = PromptLoad(chunks, urgency, self._clock)
        with self._lock:
            if not self._closed:
                turn = ReadTurn(ahead, next(self._turns))
                self._prompts.add(prompt)
                for chunk in chunks:
                    self._readings.setdefault(chunk.key, ChunkRead(chunk, turn, self._forms)).join(
                        chunk, prompt, turn
                    )
                self._start_threads()
        if self._closed:
            prompt.expire()
        self._settle([prompt])

    def close(self) -> None:
        """Read no further; missing layers are lost. Idempotent."""
        with self._lock:
            self._closed = True
            readings, self._readings = tuple(self._readings.values()), {}
            idle = [reading for reading in readings if reading.thread is None]
            prompts = tuple(self._prompts)
            threads = {*self._threads, *([] if self._watch is None else [self._watch])}
        for reading in readings:
            reading.end()
        for reading in idle:
            reading.close()
        self._settle(prompts)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_threads(self) -> None:
        """Start or stop threads to reach the wanted number; the lock is held."""
        while self._readings and len(self._threads) < min(
            THREADS, THREADS + MOST_ABANDONED - len(self._abandoned)
        ):
            thread = threading.Thread(target=self._read_layers, name="kvlinker-layers", daemon=True)
            self._threads.add(thread)
            thread.start()
        if self._watch is None:
            self._watch = threading.Thread(
                target=self._end_late_chunks, name="kvlinker-loading-watch", daemon=True
            )
            self._watch.start()

    def _read_layers(self) -> None:
        """Run in a thread that reads."""
        compute_serially()
        while (reading := self._next()) is not None:
            self._hand_out(reading, *reading.advance())

    def _next(self) -> ChunkRead | None:
        """Return the chunk to go on with; None if this thread is to end, because it finds none or
        was abandoned."""
        me = threading.current_thread()
        with self._lock:
            readings = self._readings.values()
            ahead = any(reading.turn.ahead and reading.thread is not None for reading in readings)
            ready = [
                one for one in readings if one.thread is None and not (one.turn.ahead and ahead)
            ]
            if me in self._threads and ready:
                reading = min(ready, key=lambda reading: (reading.turn, reading.progress))
                reading.thread, reading.since = me, self._clock()
                return reading
            self._threads.discard(me)
            if me in self._abandoned:
                self._abandoned.discard(me)
                self._start_threads()  # there may be too few, where too many hung
            return None

    def _hand_out(self, reading: ChunkRead, found: Found, read: TimedRead) -> None:
        """Give new layers to all prompts that want them, and end the reading with the last one; the
        prompts of one that has been removed meanwhile have ended already."""
        with self._lock:
            failed = reading.note(found, read)
            takers = tuple(reading.takers)
            if reading.opened is not None and self._readings.get(reading.key) is reading:
                self._reads[reading.opened.tier].append(read)
        for chunk, _ in takers:
            if isinstance(found, ReadLayer) and chunk.kv is not None:
                chunk.kv.deliver(found.resident)
            if not chunk.waiting:
                chunk.end(None)
        if failed is not None:
            failed.reader.close()
        if reading.loaded is not None:
            reading.end()  # so that it is in memory before it can no longer be joined
        with self._lock:
            reading.thread = None
            if reading.over and self._readings.get(reading.key) is reading:
                del self._readings[reading.key]
            removed = self._readings.get(reading.key) is not reading
        if removed:
            reading.close()
            reading.end()
        self._settle({prompt for _, prompt in reading.takers})

    def _settle(self, prompts: Iterable[PromptLoad]) -> None:
        """Start the prompts that have enough layers, and note measurements for those that have
        ended."""
        for prompt in prompts:
            prompt.begin(self.bandwidths)
            if prompt.ended:
                with self._lock:
                    self._prompts.discard(prompt)
                    reads, self._reads = self._reads, defaultdict(list)
                for tier, of_tier in reads.items():
                    self.bandwidths.note_reads(tier, of_tier)

    def _end_late_chunks(self) -> None:
        """Run in the watch, as long as anything is loaded: end reads that hang, and prompts past
        their deadlines."""
        while True:
            time.sleep(WATCH_SECONDS)
            now = self._clock()
            with self._lock:
                if not self._readings and not self._prompts:
                    self._watch = None
                    return
                late = {prompt for prompt in self._prompts if prompt.deadline <= now}
                busy = [
                    reading for reading in self._readings.values() if reading.thread is not None
                ]
                hung = [reading for reading in busy if now - reading.since > STALL_SECONDS]
                for reading in hung:
                    del self._readings[reading.key]
                    self._replace_thread(reading)
            for reading in hung:
                reading.end()
            for prompt in late:
                prompt.expire()
            self._settle(late.union(prompt for reading in hung for _, prompt in reading.takers))

    def _replace_thread(self, reading: ChunkRead) -> None:
        """Abandon the thread of a hanging read, which ends when its read does, and start another;
        the lock is held."""
        assert reading.thread is not None
        self._threads.discard(reading.thread)
        self._abandoned.add(reading.thread)
        hanging = len(self._abandoned)
        replaced = (
            "another thread reads on"
            if hanging <= MOST_ABANDONED
            else "no other takes its place: too many hang"
        )
        logger.warning(
            "A read from %s does not return (%d hang now); %s.", reading.place, hanging, replaced
        )
        self._start_threads()
