"""Reads one chunk for all prompts that want it: layer by layer, from another copy where one
fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from kvlinker.store.chunk_kv import ChunkKV, LayerKV, LayerLostError
from kvlinker.store.loading.bandwidths import TimedRead
from kvlinker.store.loading.prompt_load import ChunkLoad, LoadedChunk, OpenedChunk, PromptLoad

logger = logging.getLogger(__name__)

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
