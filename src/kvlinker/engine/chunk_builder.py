"""Computing chunks' KV: each chunk once, however many ask for it at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvlinker.chunks import Chunk
from kvlinker.engine.batch import Capture
from kvlinker.engine.loading import LoadedModel
from kvlinker.engine.observation import ScoreCollector
from kvlinker.engine.scheduler import Scheduler
from kvlinker.engine.sequence import Sequence
from kvlinker.errors import ContextLengthError, KVLinkerError
from kvlinker.store import ChunkStore
from kvlinker.store.chunk_kv import ChunkKV


@dataclass(frozen=True, slots=True)
class _Computation:
    """A chunk that is being computed, and whoever waits for it."""

    sequence: Sequence
    future: Future[ChunkKV]


class ChunkBuilder:
    """Turns chunks into sequences whose KV is captured, and stores it. ``build`` may be called from any thread, all
    else from the engine's."""

    def __init__(
        self,
        loaded: LoadedModel,
        store: ChunkStore,
        scheduler: Scheduler,
        *,
        longest: int,
        with_scores: bool,
        command: Callable[[Callable[[], None]], None],
    ) -> None:
        """``longest``: tokens that a chunk may have, with what stands before it. ``with_scores``: collect the chunks'
        attention scores. ``command`` has the engine's thread
        run something before its next step, or raises EngineClosedError."""
        self._loaded = loaded
        self._store = store
        self._scheduler = scheduler
        self._longest = longest
        self._with_scores = with_scores
        self._command = command
        self._lock = threading.Lock()
        self._by_key: dict[str, _Computation] = {}  # guarded by _lock
        self._under_way: dict[Sequence, Future[ChunkKV]] = {}  # the engine thread's

    @property
    def under_way(self) -> tuple[Sequence, ...]:
        """Sequences that are queued or being computed."""
        return tuple(self._under_way)

    def build(self, key: str, chunk: Chunk, *, urgent: bool = False) -> Future[ChunkKV]:
        """The chunk's KV, once it is computed and stored under ``key``. ``urgent``: a request waits for it.

        Raises ContextLengthError and EngineClosedError.
        """
        length = len(chunk.prefix) + len(chunk)
        if length > self._longest:
            raise ContextLengthError(
                f"A chunk has {length} tokens with what stands before it, but the model takes {self._longest}."
            )
        tokens = np.array([*chunk.prefix, *chunk.tokens], dtype=np.int64)  # [length]
        spans = [(len(chunk.prefix), length)]
        capture = Capture(self._loaded.layers, spans, dtype=self._loaded.dtype, scores=self._scores(spans, [chunk]))
        new = _Computation(Sequence(tokens, [(0, length)], most_tokens=length, capture=capture), Future())
        new.future.add_done_callback(partial(self._built, key))  # before anybody else can add theirs
        with self._lock:
            computation = self._by_key.get(key)
            if computation is None:
                self._command(partial(self._enter, new))
                computation = self._by_key[key] = new
        if urgent:
            self._command(partial(self._scheduler.promote, computation.sequence))
        return computation.future

    def finish(self, sequence: Sequence) -> None:
        """All of the chunk's tokens are computed."""
        assert sequence.capture is not None
        self._scheduler.remove(sequence)
        self._under_way.pop(sequence).set_result(sequence.capture.finish()[0])

    def fail(self, sequence: Sequence, error: KVLinkerError) -> None:
        """Give the chunk up; unknown sequences are ignored."""
        future = self._under_way.pop(sequence, None)
        if future is not None:
            self._scheduler.remove(sequence)
            future.set_exception(error)

    def _scores(self, spans: list[tuple[int, int]], chunks: list[Chunk]) -> ScoreCollector | None:
        if not self._with_scores:
            return None
        return ScoreCollector(len(self._loaded.layers), spans, [chunk.content for chunk in chunks])

    def _enter(self, computation: _Computation) -> None:
        self._under_way[computation.sequence] = computation.future
        self._scheduler.add(computation.sequence)

    def _built(self, key: str, done: Future[ChunkKV]) -> None:
        try:
            if done.exception() is None:
                self._store.put(key, done.result())
        finally:
            with self._lock:
                del self._by_key[key]
