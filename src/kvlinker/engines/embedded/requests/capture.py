"""Captures the KV of chunks while they are computed, and measures how it depends on the text before
them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.contract.finite import require_finite
from kvlinker.engines.contract.observation import ScoreCollector
from kvlinker.engines.contract.sensitivity import with_sensitivity
from kvlinker.engines.embedded.execution.capturing import Capture, Kept
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.requests.request import Ending, FutureRequest, ResultKind
from kvlinker.engines.embedded.requests.sequence import TokenSequence
from kvlinker.linking.plan import Range
from kvlinker.store import ChunkStore
from kvlinker.store.chunk_kv import ChunkKV


class _Pass(NamedTuple):
    """One pass over tokens from the first on, and the KV that it captures."""

    tokens: NDArray[np.int64]
    capture: Callable[[], Capture]


class CaptureRequest(FutureRequest[tuple[ChunkKV, ...]]):
    """Asks for the KV of chunks, computed at their positions in a text. ``future`` has the result
    once it is stored."""

    cancellation = "The chunk is not computed any more."

    def __init__(
        self,
        loaded: LoadedModel,
        tokens: NDArray[np.int64],
        spans: Sequence[tuple[int, int]],
        contents: Sequence[str],
        *,
        with_scores: bool,
        unrelated: Sequence[int] = (),
    ) -> None:
        """``spans`` are the positions [start, end) of the chunks in ``tokens`` [length];
        ``contents`` are their content hashes. With ``unrelated`` tokens, there is one chunk, with
        scores: it is computed after them first, to measure its tokens' sensitivity."""
        super().__init__()

        def capture() -> Capture:
            scores = ScoreCollector(len(loaded.layers), spans, contents) if with_scores else None
            kept = Kept(inner=loaded.keeps_inner)
            return Capture(loaded.anatomy, spans, dtype=loaded.dtype, scores=scores, kept=kept)

        def capture_behind() -> Capture:
            (start, end), more = spans[0], len(unrelated)
            only_kv = replace(loaded.anatomy, recurrences=())
            return Capture(only_kv, [(start + more, end + more)], dtype=loaded.dtype)

        passes = [_Pass(tokens, capture)]
        if unrelated:
            start = spans[0][0]
            longer = np.concatenate(
                (tokens[:start], np.array(unrelated, dtype=np.int64), tokens[start:])
            )
            passes.insert(0, _Pass(longer, capture_behind))
        first, *self._later = passes
        self._behind: ChunkKV | None = None
        self.sequence = TokenSequence(
            first.tokens,
            [(0, len(first.tokens))],
            most_tokens=len(first.tokens),
            capture=first.capture,
        )

    @property
    def pending(self) -> Sequence[Range]:
        return (*super().pending, *((0, len(later.tokens)) for later in self._later))

    def advance(self, logits: Tensor | None) -> Ending | None:
        assert self.sequence is not None
        assert self.sequence.capture is not None
        computed = self.sequence.capture.finish()
        for kv in computed:
            require_finite(kv)
        if self._later:
            (self._behind,) = computed
            self.sequence.begin_again(*self._later.pop(0))
            return None
        if self._behind is not None:
            computed = (with_sensitivity(computed[0], self._behind),)
            self._behind = None
        return partial(self.future.set_result, self._keep(computed))

    @abstractmethod
    def _keep(self, kvs: Sequence[ChunkKV]) -> tuple[ChunkKV, ...]:
        """Store the computed KV, and return the future's result. Called in the engine's thread."""


class ChunkRequest(CaptureRequest):
    """Computes chunks that a caller waits for; later callers that need the same chunks wait for the
    same request."""

    kind = ResultKind.CHUNK

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
        unrelated: Sequence[int],
        tenant: str,
        urgent: bool,
    ) -> None:
        """``keys`` are the chunks' keys in ``store``. ``tenant`` asks for them; ``urgent`` is true
        if an answer of its waits for them."""
        super().__init__(
            loaded, tokens, spans, contents, with_scores=with_scores, unrelated=unrelated
        )
        self.identity = keys, with_scores, bool(unrelated)
        self.tenant = tenant
        self.urgent = urgent
        self._keys = keys
        self._store = store

    def _keep(self, kvs: Sequence[ChunkKV]) -> tuple[ChunkKV, ...]:
        return tuple(self._store.put(key, kv) for key, kv in zip(self._keys, kvs, strict=True))


class IdleChunkRequest(ChunkRequest):
    """Computes chunks that no request waits for. A request that needs one meanwhile has it computed
    as usual, and does not wait for this."""

    kind = ResultKind.BACKGROUND

    def __init__(self, *args: Any, **options: Any) -> None:
        """Takes the arguments of ``ChunkRequest``."""
        super().__init__(*args, **options)
        self.identity = None
