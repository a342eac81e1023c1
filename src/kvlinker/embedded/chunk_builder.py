"""Computing chunks' KV: the same chunks once, however many ask for them at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as TypingSequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvlinker.embedded.batch import Capture
from kvlinker.embedded.model.loading import LoadedModel
from kvlinker.embedded.scheduler import Scheduler
from kvlinker.embedded.sequence import Sequence
from kvlinker.engine.observation import ScoreCollector
from kvlinker.errors import ContextLengthError, KVLinkerError
from kvlinker.futures import gather
from kvlinker.prompt.segments import Prompt
from kvlinker.store import ChunkStore
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.types.chunks import Chunk


@dataclass(frozen=True, slots=True)
class _Computation:
    """Chunks that are being computed, and whoever waits for them."""

    sequence: Sequence
    future: Future[tuple[ChunkKV, ...]]


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
        self._by_keys: dict[tuple[str, ...], _Computation] = {}  # guarded by _lock
        self._under_way: dict[Sequence, Future[tuple[ChunkKV, ...]]] = {}  # the engine thread's

    @property
    def under_way(self) -> tuple[Sequence, ...]:
        """Sequences that are queued or being computed."""
        return tuple(self._under_way)

    def build(self, key: str, chunk: Chunk, *, urgent: bool = False) -> Future[ChunkKV]:
        """The chunk's KV, once it is computed and stored under ``key``. ``urgent``: a request waits for it.

        Raises ContextLengthError and EngineClosedError.
        """
        tokens = np.array([*chunk.prefix, *chunk.tokens], dtype=np.int64)
        computation = self._compute((key,), tokens, [(len(chunk.prefix), len(tokens))], [chunk.content])
        if urgent:
            self._command(partial(self._scheduler.promote, computation.sequence))
        return gather([computation.future], lambda computed: computed[0][0])

    def build_prompt(self, keys: TypingSequence[str], prompt: Prompt) -> Future[tuple[ChunkKV, ...]]:
        """The KV of all chunks where they stand in ``prompt``, one key each, once it is computed and stored. Their
        scores tell how they look at one another.

        Raises ContextLengthError and EngineClosedError.
        """
        spans = [(span.start, span.end) for span in prompt.spans]
        return self._compute(tuple(keys), prompt.tokens[: spans[-1][1]], spans, prompt.contents).future

    def finish(self, sequence: Sequence) -> None:
        """All of the chunk's tokens are computed."""
        assert sequence.capture is not None
        self._scheduler.remove(sequence)
        self._under_way.pop(sequence).set_result(tuple(sequence.capture.finish()))

    def fail(self, sequence: Sequence, error: KVLinkerError) -> None:
        """Give the chunk up; unknown sequences are ignored."""
        future = self._under_way.pop(sequence, None)
        if future is not None:
            self._scheduler.remove(sequence)
            future.set_exception(error)

    def _compute(
        self,
        keys: tuple[str, ...],
        tokens: NDArray[np.int64],
        spans: list[tuple[int, int]],
        contents: TypingSequence[str],
    ) -> _Computation:
        """The computation of the chunks at ``spans`` of ``tokens`` [length], begun unless it is under way."""
        length = len(tokens)
        if length > self._longest:
            raise ContextLengthError(
                f"A chunk has {length} tokens with what stands before it, but the model takes {self._longest}."
            )
        scores = ScoreCollector(len(self._loaded.layers), spans, contents) if self._with_scores else None
        capture = Capture(self._loaded.layers, spans, dtype=self._loaded.dtype, scores=scores)
        new = _Computation(Sequence(tokens, [(0, length)], most_tokens=length, capture=capture), Future())
        new.future.add_done_callback(partial(self._built, keys))  # before anybody else can add theirs
        with self._lock:
            computation = self._by_keys.get(keys)
            if computation is None:
                self._command(partial(self._enter, new))
                computation = self._by_keys[keys] = new
        return computation

    def _enter(self, computation: _Computation) -> None:
        self._under_way[computation.sequence] = computation.future
        self._scheduler.add(computation.sequence)

    def _built(self, keys: tuple[str, ...], done: Future[tuple[ChunkKV, ...]]) -> None:
        try:
            if done.exception() is None:
                for key, kv in zip(keys, done.result(), strict=True):
                    self._store.put(key, kv)
        finally:
            with self._lock:
                del self._by_keys[keys]
