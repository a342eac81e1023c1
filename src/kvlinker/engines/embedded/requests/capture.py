"""Captures the KV of chunks while texts that have them are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.contract.finite import require_finite
from kvlinker.engines.contract.observation import ScoreCollector
from kvlinker.engines.embedded.execution.capturing import Capture
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.requests.request import Ending, FutureRequest, ResultKind
from kvlinker.engines.embedded.requests.sequence import TokenSequence
from kvlinker.prompting.segments import Range
from kvlinker.store.chunk_kv import ChunkKV


@dataclass(frozen=True, slots=True)
class Reading:
    """One pass over a text, in which the KV of chunks is captured."""

    tokens: NDArray[np.int64]
    """The text, [length]."""

    spans: Sequence[tuple[int, int]]
    """The positions [start, end) of the chunks in it."""

    scored: Sequence[str] | None = None
    """The content hashes of the chunks whose attention scores are collected; None for no scores."""

    keeps_states: bool = True
    """False if what layers with a state would keep of the chunks is not wanted."""


class CaptureRequest(FutureRequest[tuple[ChunkKV, ...]]):
    """Asks for the KV of chunks, computed at their positions in texts. ``future`` has the result
    once it is stored."""

    cancellation = "The chunk is not computed any more."

    def __init__(
        self,
        loaded: LoadedModel,
        readings: Sequence[Reading],
        *,
        kind: ResultKind,
        keep: Callable[[Sequence[tuple[ChunkKV, ...]]], tuple[ChunkKV, ...]],
        identity: object,
        tenant: str = "",
        urgent: bool = False,
    ) -> None:
        """``readings`` are computed one after the other, none longer than the first. ``keep`` is
        given the KV that each of them captured, stores what it makes of that, and returns the
        future's result; it is called in the engine's thread. ``tenant`` asks for them; ``urgent``
        is true if an answer of its waits for them."""
        super().__init__()
        self.kind = kind
        self.identity = identity
        self.tenant = tenant
        self.urgent = urgent
        self._loaded = loaded
        self._keep = keep
        first, *self._later = readings
        self._captured: list[tuple[ChunkKV, ...]] = []
        self.sequence = TokenSequence(
            first.tokens,
            [(0, len(first.tokens))],
            most_tokens=len(first.tokens),
            capture=partial(self._capture, first),
        )

    @property
    def pending(self) -> Sequence[Range]:
        return (*super().pending, *((0, len(reading.tokens)) for reading in self._later))

    def advance(self, logits: Tensor | None) -> Ending | None:
        assert self.sequence is not None
        assert self.sequence.capture is not None
        computed = self.sequence.capture.finish()
        for kv in computed:
            require_finite(kv)
        self._captured.append(computed)
        if self._later:
            reading = self._later.pop(0)
            self.sequence.begin_again(reading.tokens, partial(self._capture, reading))
            return None
        captured, self._captured = self._captured, []
        return partial(self.future.set_result, self._keep(captured))

    def _capture(self, reading: Reading) -> Capture:
        anatomy = self._loaded.anatomy
        scores = None
        if reading.scored is not None:
            scores = ScoreCollector(len(self._loaded.layers), reading.spans, reading.scored)
        return Capture(
            anatomy if reading.keeps_states else replace(anatomy, recurrences=()),
            reading.spans,
            dtype=self._loaded.dtype,
            scores=scores,
            keeps_inner=self._loaded.keeps_inner and reading.keeps_states,
        )
