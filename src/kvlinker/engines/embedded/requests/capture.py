"""Captures the KV of chunks while they are computed, and measures how it depends on the text before
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.contract.finite import require_finite
from kvlinker.engines.contract.observation import ScoreCollector
from kvlinker.engines.contract.sensitivity import with_sensitivity
from kvlinker.engines.embedded.execution.capturing import Capture
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.requests.request import Ending, FutureRequest, ResultKind
from kvlinker.engines.embedded.requests.sequence import TokenSequence
from kvlinker.linking.plan import Range
from kvlinker.store.chunk_kv import ChunkKV


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
        kind: ResultKind,
        keep: Callable[[Sequence[ChunkKV]], tuple[ChunkKV, ...]],
        identity: object,
        with_scores: bool,
        unrelated: Sequence[int] = (),
        tenant: str = "",
        urgent: bool = False,
    ) -> None:
        """``spans`` are the positions [start, end) of the chunks in ``tokens`` [length];
        ``contents`` are their content hashes. ``keep`` stores the computed KV, and returns the
        future's result; it is called in the engine's thread. With ``unrelated`` tokens, there is
        one chunk, with scores: it is computed after them first, to measure its tokens' sensitivity.
        ``tenant`` asks for them; ``urgent`` is true if an answer of its waits for them."""
        super().__init__()
        self.kind = kind
        self.identity = identity
        self.tenant = tenant
        self.urgent = urgent
        self._keep = keep

        def capture() -> Capture:
            scores = ScoreCollector(len(loaded.layers), spans, contents) if with_scores else None
            return Capture(
                loaded.anatomy,
                spans,
                dtype=loaded.dtype,
                scores=scores,
                keeps_inner=loaded.keeps_inner,
            )

        def capture_behind() -> Capture:
            (start, end), more = spans[0], len(unrelated)
            only_kv = replace(loaded.anatomy, recurrences=())
            return Capture(only_kv, [(start + more, end + more)], dtype=loaded.dtype)

        # passes that are left, each with its tokens, and what makes the collector of its KV
        self._later = [(tokens, capture)]
        if unrelated:
            start = spans[0][0]
            longer = np.concatenate(
                (tokens[:start], np.array(unrelated, dtype=np.int64), tokens[start:])
            )
            self._later.insert(0, (longer, capture_behind))
        self._behind: ChunkKV | None = None
        first, make = self._later.pop(0)
        self.sequence = TokenSequence(
            first, [(0, len(first))], most_tokens=len(first), capture=make
        )

    @property
    def pending(self) -> Sequence[Range]:
        return (*super().pending, *((0, len(tokens)) for tokens, _ in self._later))

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
