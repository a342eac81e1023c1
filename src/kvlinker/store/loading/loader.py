"""Reads chunks from slower tiers layer by layer: a prompt's first layers compute while its last
ones are read.

A few threads read, a layer at a time: the oldest prompt first, and of its chunks the one of which
least has been read, so that a prompt's chunks advance in step. A chunk that several prompts want is
read once; each of them gets an ``ArrivingKV`` of its own.

One watch ends late reads. A prompt past its deadline cancels the chunks that it waits for. A read
that does not return is left to itself: its chunk is lost to all prompts that want it, and another
thread takes its thread's place.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from kvlinker.base.threads import compute_serially
from kvlinker.store.chunk_kv import ChunkKV, LayerKV, LayerLostError
from kvlinker.store.loading.bandwidths import Bandwidths, TimedRead
from kvlinker.store.loading.prompt_load import (
    ChunkLoad,
    LoadedChunk,
    OpenedChunk,
    PromptLoad,
    Urgency,
)

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


Form = Callable[[int, LayerKV], LayerKV]
"""Returns a layer, given its index, as it is to be delivered."""


@dataclass(frozen=True, slots=True)
class ReadLayer:
    """A layer that was read, as it is stored and in its resident form."""

    stored: LayerKV
    resident: LayerKV


Found = OpenedChunk | LoadedChunk | ReadLayer | None


class ReadTurn(NamedTuple):
    """The order in which chunks are read."""

    ahead: bool
    """True if the chunk is read ahead for a later prompt, and no prompt waits for it."""

    number: int
    """The number of the eldest prompt that wants it."""


class ChunkRead:
    """A chunk that is being read.

    One thread at a time advances it. Prompts join, and new layers are noted, under the loader's
    lock. ``end`` and ``close`` are called without it: a prompt that joins during ``end`` may be
    left out, so the loader calls ``end`` again when none can join any more.
    """

    def __init__(self, chunk: ChunkLoad, turn: ReadTurn, forms: Callable[[int], Form]) -> None:
        self.key = chunk.key
        self.turn = turn
        self.takers: list[tuple[ChunkLoad, PromptLoad]] = []
        self.opened: OpenedChunk | None = None
        self.loaded: LoadedChunk | None = None
        self.thread: threading.Thread | None = None
        self.since = 0.0
        self._find = chunk.find
        self._forms = forms
        self._form: Form | None = None
        self._tried: set[str] = set()
        self._exhausted = False
        self._layers: list[ReadLayer] = []
        self._seconds = 0.0

    @property
    def progress(self) -> int:
        """The number of layers that were read, or -1 if no copy is open."""
        return -1 if self.opened is None else len(self._layers)

    @property
    def place(self) -> str:
        """The tier that is being read, for the log."""
        return "a tier" if self.opened is None else f"tier {self.opened.tier}"

    @property
    def over(self) -> bool:
        """True if nothing is left to read: the chunk is there, no copy of it is left, or no prompt
        waits for it."""
        return (
            self.loaded is not None
            or self._exhausted
            or not any(chunk.waiting for chunk, _ in self.takers)
        )

    def join(self, chunk: ChunkLoad, prompt: PromptLoad, turn: ReadTurn) -> None:
        """Add a prompt that gets the layers, in the earlier of the turns."""
        self.turn = min(self.turn, turn)
        self.takers.append((chunk, prompt))
        if self.opened is not None:
            self._open(chunk, self.opened)

    def advance(self) -> tuple[Found, TimedRead]:
        """Open a copy, or read the next layer; None if there is none, or it cannot be read. Returns
        the time that it took, too."""
        found: Found = None
        nbytes = 0
        begin, busy = time.perf_counter(), time.thread_time()
        try:
            with suppress(LayerLostError):
                if self.opened is None:
                    found = self._find(self._tried)
                    if isinstance(found, OpenedChunk):
                        nbytes = sum(state.nbytes for state in found.reader.states)
                else:
                    reader = self.opened.reader
                    layer = reader.read(len(self._layers))
                    self._form = self._form or self._forms(reader.layers)
                    found = ReadLayer(layer, self._form(len(self._layers), layer))
                    nbytes = reader.nbytes // reader.layers
        except Exception:
            logger.exception("A chunk could not be read from %s.", self.place)
        return found, TimedRead(begin, time.perf_counter(), time.thread_time() - busy, nbytes)

    def note(self, found: Found, read: TimedRead) -> OpenedChunk | None:
        """Take in the result of ``advance``. A copy that failed is returned, to be closed: another
        may be found."""
        self._seconds += read.seconds
        failed = None
        if isinstance(found, LoadedChunk):
            self.loaded = found
        elif isinstance(found, OpenedChunk):
            self.opened = found
            for chunk, _ in self.takers:
                self._open(chunk, found)
            self.loaded = self._whole()
        elif isinstance(found, ReadLayer):
            self._layers.append(found)
            self.loaded = self._whole()
        elif self.opened is not None:
            self._tried.add(self.opened.tier)
            failed, self.opened = self.opened, None
        else:
            self._exhausted = True
        return failed

    def end(self) -> None:
        """Notify all prompts that the chunk is there, or will not be. Idempotent."""
        for chunk, _ in self.takers:
            chunk.end(self.loaded)

    def close(self) -> None:
        """Close the open copy. Idempotent."""
        opened, self.opened = self.opened, None
        if opened is not None:
            opened.reader.close()

    def _open(self, chunk: ChunkLoad, opened: OpenedChunk) -> None:
        """Let the chunk arrive from a copy, with the layers that are there already, which may be
        another copy's."""
        chunk.open(opened, [read.resident for read in self._layers])

    def _whole(self) -> LoadedChunk | None:
        """Return the chunk, once all its layers are there."""
        assert self.opened is not None
        reader = self.opened.reader
        if len(self._layers) < reader.layers:
            return None
        resident, stored = (
            ChunkKV(layers, reader.scores, reader.states, reader.tokens, reader.contexts)
            for layers in (
                tuple(read.resident for read in self._layers),
                tuple(read.stored for read in self._layers),
            )
        )
        return LoadedChunk(self.opened.tier, resident, self._seconds, stored)


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
