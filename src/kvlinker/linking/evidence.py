"""What a policy may look at besides the prompt: stored scores, attention, deviations, forecasts and variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvlinker.prompt.segments import Prompt
from kvlinker.types.chunk_scores import ChunkScores, Contextualization
from kvlinker.types.chunks import Chunk


class Evidence(Protocol):
    """What is known before the first layer."""

    def scores(self, chunk: int) -> ChunkScores | None:
        """Scores from the creation of ``prompt.chunks[chunk]``'s KV, for policies with ``uses_scores``.

        None for KV that was stored without them.
        """
        ...

    def question_attention(self) -> NDArray[np.float32]:
        """The last token's attention on every token over the placed KV, mean over heads: [layers, length].

        For policies that probe.
        """
        ...


@dataclass(frozen=True, slots=True)
class PromptEvidence:
    """The ``Evidence`` of one prompt: its chunks' stored scores, and a probe's attention, each if asked for."""

    chunk_scores: tuple[ChunkScores | None, ...] | None = None
    attention: NDArray[np.float32] | None = None

    def scores(self, chunk: int) -> ChunkScores | None:
        if self.chunk_scores is None:
            raise RuntimeError("a policy that looks at chunks' scores must say that it uses them")
        return self.chunk_scores[chunk]

    def question_attention(self) -> NDArray[np.float32]:
        if self.attention is None:
            raise RuntimeError("a policy that looks at the question's attention must say that it probes")
        return self.attention


class LayerEvidence(Protocol):
    """What a layer's keys and values show about the tokens that the policy has kept so far, before its attention."""

    @property
    def prompt(self) -> Prompt: ...

    @property
    def layer(self) -> int: ...

    @property
    def layers(self) -> int:
        """The model's layers."""
        ...

    @property
    def positions(self) -> NDArray[np.int64]:
        """The tokens that are still computed, ascending: [active]."""
        ...

    @property
    def cached(self) -> NDArray[np.bool_]:
        """True for active tokens that a chunk cache holds, false for fresh ones: [active]."""
        ...

    @property
    def selected(self) -> int:
        """How many cached tokens the policy selected before the first layer."""
        ...

    def key_deviation(self) -> NDArray[np.float32]:
        """Squared L2 distance of new and placed key, over all heads: [active], 0 for fresh tokens."""
        ...

    def value_deviation(self) -> NDArray[np.float32]:
        """Squared L2 distance of new and placed value, over all heads: [active], 0 for fresh tokens."""
        ...

    def chunk_attention(self) -> NDArray[np.float32]:
        """The question's attention on every chunk in the layers before this one: [layers so far, chunks].

        Sum over the question's tokens (those behind the last chunk), mean over heads. For policies that watch; it ends
        with the first layer in which no policy asks for it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds; None is not measured yet. ``load``: reading the prompt's chunks from the tiers in which they lie (what
    is in memory takes none), T_load. ``prefill``: computing all of their tokens as one text, T_prefill(L).
    ``overlaps``: computation can go on beside the loading; else one comes after the other."""

    load: float | None
    prefill: float | None
    overlaps: bool = True

    @property
    def worth_loading(self) -> bool:
        """Loading takes no longer than computing everything."""
        return self.load is not None and self.prefill is not None and self.load <= self.prefill

    def hidden_percent(self, least: float) -> float:
        """Percent of the tokens that can be computed again while the chunks are loaded, at no cost in time, but at
        least ``least`` (CacheBlend, section 5.1): the r with r · T_prefill = T_load, then max(r, r*), at most 100.

        Loading that overlaps with nothing hides nothing: the least, unless it would be quicker to compute everything.
        """
        if self.load is None or not self.prefill:
            return least
        percent = 100 * (self.load / self.prefill)
        if not self.overlaps:
            return 100.0 if percent + least > 100 else least
        return min(100.0, max(percent, least))


@dataclass(frozen=True, slots=True)
class Variant:
    """A chunk whose KV was computed behind ``chunk.prefix``, and how it depends on the chunks in there."""

    chunk: Chunk
    contextualization: Contextualization


class Library(Protocol):
    """The variants that are stored."""

    def variants(self, chunk: Chunk) -> Sequence[Variant]:
        """Variants with the same tokens as ``chunk``, besides itself."""
        ...


class NoVariants:
    """A ``Library`` of nothing."""

    def variants(self, chunk: Chunk) -> Sequence[Variant]:
        return ()
