"""Reads chunks from slower tiers layer by layer: a prompt's first layers compute while its last ones are read.

A few threads read, a layer at a time: the oldest prompt first, and of its chunks the one of which least has been read,
so that a prompt's chunks advance in step. A chunk that several prompts want is read once; each of them gets an
``ArrivingKV`` of its own.

One watch ends what takes too long. A prompt past its deadline gives up what it waits for. A read that does not return
is left to itself: its chunk is lost to all who want it, and another thread takes its thread's place.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvlinker.store.chunk_kv import ChunkKV, LayerKV
from kvlinker.store.loading.arriving import LayerLostError
from kvlinker.store.loading.prompt_load import ChunkLoad, LoadedChunk, OpenedChunk, PromptLoad, Urgency
from kvlinker.store.loading.throughput import Bandwidths, LoadTime, Read
from kvlinker.threads import compute_serially

logger = logging.getLogger(__name__)

THREADS = 2

STALL_SECONDS = 5.0
"""The seconds after which a single read counts as hanging."""

MOST_ABANDONED = 8
"""The most threads that may hang and are replaced; after that, no further one is."""

CLOSE_SECONDS = 5.0
"""The seconds that closing waits for reads under way; reads that hang do not hold up the process's end."""


@dataclass(frozen=True, slots=True)
class ReadLayer:
    """A layer that was read, as it is stored and in its resident form."""

    stored: LayerKV
    resident: LayerKV


Form = Callable[[int, LayerKV], LayerKV]
Found = OpenedChunk | LoadedChunk | ReadLayer | None


class LayerLoader:
    """Owns the reading threads, the chunks that they read, and the watch thread. Any thread may call the methods."""

    def __init__(self, bandwidths: Bandwidths | None = None, form: Form = lambda _, layer: layer) -> None:
        """Note in ``bandwidths`` how fast tiers deliver. ``form`` returns a layer, given its index, as it is to be
        delivered."""
        self.bandwidths = bandwidths or Bandwidths()
        self._form = form
        self._lock = threading.Lock()  # guards all that follows
        self._work = threading.Condition(self._lock)
        self._lateness = threading.Condition(self._lock)
        self._readings: dict[str, _Reading] = {}
        self._prompts: set[PromptLoad] = set()
        self._reads: dict[str, list[Read]] = {}  # by tier, not yet noted
        self._turns = itertools.count()
        self._threads: set[threading.Thread] = set()
        self._abandoned: set[threading.Thread] = set()
        self._watch: threading.Thread | None = None
        self._closed = False

    def load(self, chunks: Sequence[ChunkLoad], urgency: Urgency, *, ahead: bool = False) -> None:
        """Begin to read the chunks of one prompt; each of their futures will be resolved. What is loaded ``ahead`` of
        need comes after all else, and leaves a thread free for it."""
        prompt = PromptLoad(chunks, urgency)
        with self._lock:
            closed = self._closed
            if not closed:
                turn = (ahead, next(self._turns))
                self._prompts.add(prompt)
                for chunk in chunks:
                    reading = self._readings.setdefault(chunk.key, _Reading(chunk, turn, self._form))
                    reading.join(chunk, prompt, turn)
                self._start_threads()
                self._work.notify_all()
                self._lateness.notify()
        if closed:
            prompt.expire()
        self._settle([prompt])

    def close(self) -> None:
        """Read no further; what is not there by now is lost. Idempotent."""
        with self._lock:
            self._closed = True
            readings, self._readings = tuple(self._readings.values()), {}
            idle = [reading for reading in readings if reading.thread is None]
            prompts = tuple(self._prompts)
            threads = {*self._threads, *([] if self._watch is None else [self._watch])}
            self._work.notify_all()
            self._lateness.notify()
        for reading in readings:
            reading.end(None)
        for reading in idle:
            reading.close()
        self._settle(prompts)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_threads(self) -> None:
        """Have as many threads as there should be; the lock is held."""
        while len(self._threads) < min(THREADS, THREADS + MOST_ABANDONED - len(self._abandoned)):
            thread = threading.Thread(target=self._read_layers, name="kvlinker-layers", daemon=True)
            self._threads.add(thread)
            thread.start()
        if self._watch is None:
            self._watch = threading.Thread(target=self._end_what_is_late, name="kvlinker-loading-watch", daemon=True)
            self._watch.start()

    def _read_layers(self) -> None:
        """Run in a thread that reads."""
        compute_serially()
        reading = None
        while (reading := self._next(reading)) is not None:
            begin, busy = time.perf_counter(), time.thread_time()
            found = reading.advance()
            nbytes = reading.layer_nbytes if isinstance(found, ReadLayer) else 0
            self._hand_out(reading, found, Read(begin, time.perf_counter(), time.thread_time() - busy, nbytes))

    def _next(self, done: _Reading | None) -> _Reading | None:
        """Wait for a chunk to go on with; None where this thread is to end."""
        me = threading.current_thread()
        with self._lock:
            left_open = done if self._closed else None
            if done is not None:
                done.thread = None
            while me in self._threads and not self._closed:
                readings = self._readings.values()
                ahead = sum(reading.ahead and reading.thread is not None for reading in readings)
                idle = [reading for reading in readings if reading.thread is None]
                ready = [reading for reading in idle if not reading.ahead or ahead < THREADS - 1]
                if ready:
                    reading = min(ready, key=lambda reading: (reading.turn, reading.progress))
                    reading.thread, reading.since = me, time.monotonic()
                    if done in idle and done is not reading:
                        self._work.notify()
                    return reading
                self._work.wait()
            self._threads.discard(me)
            if me in self._abandoned:
                self._abandoned.discard(me)
                if not self._closed:
                    self._start_threads()  # there may be too few, where too many hung
        if left_open is not None:
            left_open.close()
        return None

    def _hand_out(self, reading: _Reading, found: Found, read: Read) -> None:
        """Give the layers that were read to all prompts that want them; do nothing if the reading has been removed
        meanwhile."""
        with self._lock:
            failed = reading.note(found, read)
            takers = tuple(reading.takers)
            loaded = found if isinstance(found, LoadedChunk) else reading.loaded
            if reading.opened is not None and self._readings.get(reading.key) is reading:
                self._reads.setdefault(reading.opened.tier, []).append(read)
        for chunk, _ in takers:
            if isinstance(found, ReadLayer) and chunk.kv is not None:
                chunk.kv.deliver(found.resident)
            if not chunk.waiting:
                chunk.end(None)
        if failed is not None:
            failed.reader.close()
        if loaded is not None:
            reading.end(loaded)  # so that it is in memory before it can no longer be joined
        with self._lock:
            removed = self._readings.get(reading.key) is not reading
            if not removed and (loaded is not None or not reading.wanted or (found is None and failed is None)):
                del self._readings[reading.key]
                removed = True
        if removed:
            reading.close()
            reading.end(loaded)
        self._settle({prompt for _, prompt in reading.takers})

    def _settle(self, prompts: Iterable[PromptLoad]) -> None:
        """Start the prompts that have enough layers, and note measurements for those that have ended."""
        for prompt in prompts:
            if prompt.begin(self.bandwidths):
                with self._lock:
                    self._lateness.notify()
            if prompt.ended:
                with self._lock:
                    self._prompts.discard(prompt)
                    reads, self._reads = self._reads, {}
                for tier, of_tier in reads.items():
                    self.bandwidths.note_reads(tier, of_tier)

    def _end_what_is_late(self) -> None:
        """Run in the watch."""
        while (late := self._wait_for_lateness()) is not None:
            hung, prompts = late
            for reading in hung:
                reading.end(None)
            for prompt in prompts:
                prompt.expire()
            self._settle({*prompts, *(prompt for reading in hung for _, prompt in reading.takers)})

    def _wait_for_lateness(self) -> tuple[list[_Reading], list[PromptLoad]] | None:
        """Wait until there are reads that hang, or prompts past their deadlines; None once closed."""
        with self._lock:
            while not self._closed:
                now = time.monotonic()
                prompts = [prompt for prompt in self._prompts if prompt.deadline <= now]
                hung = [reading for reading in self._readings.values() if reading.hangs(now)]
                for reading in hung:
                    del self._readings[reading.key]
                    self._replace_thread(reading)
                if prompts or hung:
                    return hung, prompts
                deadline = min((prompt.deadline for prompt in self._prompts), default=math.inf)
                self._lateness.wait(min(deadline - now, STALL_SECONDS) if self._prompts or self._readings else None)
            return None

    def _replace_thread(self, reading: _Reading) -> None:
        """Abandon the thread of a hanging read, which ends when its read does, and start another; the lock is held."""
        assert reading.thread is not None
        self._threads.discard(reading.thread)
        self._abandoned.add(reading.thread)
        hanging = len(self._abandoned)
        replaced = "another thread reads on" if hanging <= MOST_ABANDONED else "no other takes its place: too many hang"
        logger.warning("A read from %s does not return (%d hang now); %s.", reading.place, hanging, replaced)
        self._start_threads()


class _Reading:
    """A chunk that is being read, for all prompts that want it. One thread at a time advances it."""

    def __init__(self, chunk: ChunkLoad, turn: tuple[bool, int], form: Form) -> None:
        self._form = form
        self.key = chunk.key
        self.turn = turn
        self.takers: list[tuple[ChunkLoad, PromptLoad]] = []
        self.opened: OpenedChunk | None = None
        self.thread: threading.Thread | None = None
        self.since = 0.0
        self._find = chunk.find
        self._tried: set[str] = set()
        self._layers: list[ReadLayer] = []
        self._taken = LoadTime()

    @property
    def ahead(self) -> bool:
        """True if the chunk is read ahead for a later prompt, and no prompt waits for it."""
        return self.turn[0]

    @property
    def progress(self) -> int:
        """The number of layers that were read, or -1 where no copy is open."""
        return -1 if self.opened is None else len(self._layers)

    @property
    def place(self) -> str:
        """The tier that is being read, for the log."""
        return "a tier" if self.opened is None else f"tier {self.opened.tier}"

    @property
    def wanted(self) -> bool:
        """True if any prompt still waits for the chunk."""
        return any(chunk.waiting for chunk, _ in self.takers)

    @property
    def layer_nbytes(self) -> int:
        """The approximate bytes of one layer, as they are read."""
        return 0 if self.opened is None else self.opened.reader.nbytes // self.opened.reader.layers

    @property
    def loaded(self) -> LoadedChunk | None:
        """The chunk, once all its layers are there."""
        if self.opened is None or len(self._layers) < self.opened.reader.layers:
            return None
        scores = self.opened.reader.scores
        kv, stored = (
            ChunkKV(layers, scores)
            for layers in (tuple(read.resident for read in self._layers), tuple(read.stored for read in self._layers))
        )
        return LoadedChunk(self.opened.tier, kv, self._taken.seconds, stored)

    def hangs(self, now: float) -> bool:
        """Return whether the current read has taken longer than ``STALL_SECONDS``."""
        return self.thread is not None and now - self.since > STALL_SECONDS

    def join(self, chunk: ChunkLoad, prompt: PromptLoad, turn: tuple[bool, int]) -> None:
        """Have one more prompt get the layers, in the earlier of the turns."""
        self.turn = min(self.turn, turn)
        self.takers.append((chunk, prompt))
        chunk.taken = self._taken
        if self.opened is not None:
            chunk.open(self.opened, [read.resident for read in self._layers])

    def advance(self) -> Found:
        """Open a copy, or read the next layer; None where there is none, or it cannot be read."""
        try:
            if self.opened is None:
                return self._find(self._tried)
            layer = self.opened.reader.read(len(self._layers))
            return ReadLayer(layer, self._form(len(self._layers), layer))
        except LayerLostError:
            return None
        except Exception:
            logger.exception("A chunk could not be read from %s.", self.place)
            return None

    def note(self, found: Found, read: Read) -> OpenedChunk | None:
        """Take in what ``advance`` returned. A copy that failed is returned, to be closed: another may be found."""
        self._taken += read.time
        failed = None
        if isinstance(found, ReadLayer):
            self._layers.append(found)
        elif isinstance(found, OpenedChunk):
            self.opened = found
        elif found is None and self.opened is not None:
            self._tried.add(self.opened.tier)
            failed, self.opened = self.opened, None
        for chunk, _ in self.takers:
            chunk.taken = self._taken
            if self.opened is not None:
                chunk.open(self.opened, ())
        return failed

    def end(self, loaded: LoadedChunk | None) -> None:
        """Tell all prompts that the chunk is there, or will not be."""
        for chunk, _ in self.takers:
            chunk.end(loaded)

    def close(self) -> None:
        """Give up the copy that is open. Idempotent."""
        opened, self.opened = self.opened, None
        if opened is not None:
            opened.reader.close()
