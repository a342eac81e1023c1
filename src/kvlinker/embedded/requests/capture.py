"""Captures the KV of chunks while they are computed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.embedded.execution.batch import Capture
from kvlinker.embedded.model.loaded import LoadedModel
from kvlinker.embedded.requests.request import Ending, Kind, Request
from kvlinker.embedded.requests.sequence import TokenSequence
from kvlinker.engine.observation import ScoreCollector
from kvlinker.errors import EngineClosedError, KVLinkerError
from kvlinker.store import ChunkStore
from kvlinker.store.chunk_kv import ChunkKV


class CaptureRequest(Request):
    """Asks for the KV of chunks, computed at their positions in a text. ``future`` has the result once it is stored."""

    def __init__(
        self,
        loaded: LoadedModel,
        tokens: NDArray[np.int64],
        spans: Sequence[tuple[int, int]],
        contents: Sequence[str],
        *,
        with_scores: bool,
    ) -> None:
        """``spans`` are the positions [start, end) of the chunks in ``tokens`` [length]; ``contents`` are their content
        hashes."""
        super().__init__()
        self.future: Future[tuple[ChunkKV, ...]] = Future()
        self.future.set_running_or_notify_cancel()

        def capture() -> Capture:
            scores = ScoreCollector(len(loaded.layers), spans, contents) if with_scores else None
            return Capture(loaded.layers, spans, dtype=loaded.dtype, scores=scores)

        self.sequence = TokenSequence(tokens, [(0, len(tokens))], most_tokens=len(tokens), capture=capture)

    def advance(self, logits: Tensor | None) -> Ending:
        assert self.sequence is not None
        assert self.sequence.capture is not None
        return partial(self.future.set_result, self._keep(self.sequence.capture.finish()))

    def cancel(self) -> None:
        self.fail(EngineClosedError("The chunk is not computed any more."))

    def fail(self, error: KVLinkerError) -> None:
        self.future.set_exception(error)

    @abstractmethod
    def _keep(self, kvs: Sequence[ChunkKV]) -> tuple[ChunkKV, ...]:
        """Store the computed KV, and return what the future gets. Called in the engine's thread."""


class ChunkRequest(CaptureRequest):
    """Asks for chunks that somebody waits for; later callers who ask for the same chunks wait for the same request."""

    kind = Kind.CHUNK

    def __init__(
        self,
        loaded: LoadedModel,
        store: ChunkStore,
        keys: tuple[str, ...],
        tokens: NDArray[np.int64],
        spans: Sequence[tuple[int, int]],
        contents: Sequence[str],
        *,
        with_scores: bool,
        tenant: str,
        urgent: bool,
    ) -> None:
        """``keys`` are the chunks' keys in ``store``. ``tenant`` asks for them; ``urgent`` is true if an answer of its
        waits for them."""
        super().__init__(loaded, tokens, spans, contents, with_scores=with_scores)
        self.identity = keys, with_scores
        self.tenant = tenant
        self.urgent = urgent
        self._keys = keys
        self._store = store

    def _keep(self, kvs: Sequence[ChunkKV]) -> tuple[ChunkKV, ...]:
        return tuple(self._store.put(key, kv) for key, kv in zip(self._keys, kvs, strict=True))
