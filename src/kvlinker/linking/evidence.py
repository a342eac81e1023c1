"""The evidence by which policies decide, in addition to the prompt: scores, attention, deviations,
forecasts and variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.types.chunk_scores import ChunkScores, Contextualization
from kvlinker.base.types.chunks import Chunk
from kvlinker.linking.selection import Score
from kvlinker.prompting.segments import Prompt


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence that is available before the first layer, as far as it has been gathered."""

    chunk_scores: tuple[ChunkScores | None, ...] | None = None
    """The scores stored with each of the prompt's chunks, in order."""

    attention: NDArray[np.float32] | None = None
    """The question's attention in a first pass: [layers, length], mean over heads."""

    def scores(self, chunk: int) -> ChunkScores | None:
        """Return the scores from the creation of ``prompt.chunks[chunk]``'s KV; None for KV that
        was stored without.

        They are there for policies that need ``scores`` or ``sensitivity``.
        """
        if self.chunk_scores is None:
            raise RuntimeError("a policy that looks at chunks' scores must say that it needs them")
        return self.chunk_scores[chunk]

    def question_attention(self) -> NDArray[np.float32]:
        """Return the last token's attention on every token over the cached KV, mean over heads:
        [layers, length].

        It is there for policies that need ``question_attention``.
        """
        if self.attention is None:
            raise RuntimeError(
                "a policy that looks at the question's attention must say that it needs it"
            )
        return self.attention


class Deviations(Protocol):
    """The deviation of a layer's newly computed keys and values from the cached ones, for a
    request's active tokens."""

    def deviation(self, part: int) -> NDArray[np.float32]:
        """Return the squared L2 distance of new and cached key (``part`` 0) or value (1), over all
        heads: [active]."""


class ChunkAttention(Protocol):
    """The question's attention on every chunk, collected layer by layer for as long as a policy
    asks for it."""

    @property
    def attention(self) -> NDArray[np.float32]:
        """The attention: [layers so far, chunks], summed over the question's tokens, mean over
        heads."""

    def want(self, layer: int) -> None:
        """Ask for this layer's attention, too. Collecting ends with the first layer that no policy
        asks for."""


@dataclass(frozen=True, slots=True)
class LayerEvidence:
    """The evidence of one layer, before its attention, on the tokens that the policy has kept so
    far."""

    prompt: Prompt
    """The prompt as the policy arranged it."""

    layer: int
    """The number of the layer, from 0 on."""

    layers: int
    """The number of the model's layers."""

    positions: NDArray[np.int64]
    """The positions of the tokens that are still computed, ascending: [active]."""

    cached: NDArray[np.bool_]
    """A mask that is true for active tokens that a chunk cache holds, false for fresh ones:
    [active]."""

    selected: int
    """The number of cached tokens that the policy selected before the first layer."""

    kv: Deviations
    """The deviations of all tokens of the request that the step computes."""

    rows: NDArray[np.int64]
    """The indices of the active tokens in ``kv``: [active]."""

    watch: ChunkAttention | None
    """The question's attention; None where no policy needs it."""

    shown: list[Score] | None
    """Takes the figures that the policy asks for; None unless it is to be explained."""

    def key_deviation(self) -> NDArray[np.float32]:
        """Return the squared L2 distance of new and cached key, over all heads: [active], 0 for
        fresh tokens."""
        return self._deviation("key_deviation", 0)

    def value_deviation(self) -> NDArray[np.float32]:
        """Return the squared L2 distance of new and cached value, over all heads: [active], 0 for
        fresh tokens."""
        return self._deviation("value_deviation", 1)

    def chunk_attention(self) -> NDArray[np.float32]:
        """Return the question's attention on every chunk in the layers before this one: [layers so
        far, chunks].

        It is the sum over the question's tokens (those after the last chunk) and the mean over
        heads. It is there for policies that need ``chunk_attention``, and ends with the first layer
        in which no policy asks for it.
        """
        if self.watch is None:
            raise RuntimeError(
                "a policy that looks at the question's attention on chunks must say that it"
                " needs it"
            )
        self.watch.want(self.layer)
        attention = self.watch.attention
        if self.shown is not None and len(attention):
            self.shown.append(Score("chunk_attention", attention[-1], layer=self.layer - 1))
        return attention

    def _deviation(self, name: str, part: int) -> NDArray[np.float32]:
        deviation = np.where(self.cached, self.kv.deviation(part)[self.rows], np.float32(0))
        if self.shown is not None:
            self.shown.append(
                Score(name, deviation[self.cached], self.positions[self.cached], self.layer)
            )
        return deviation


@dataclass(frozen=True, slots=True)
class Forecast:
    """The expected times of loading and of computing a prompt's chunks, in seconds; None if not
    measured yet."""

    load: float | None
    """Seconds to read the chunks from the tiers that hold them, T_load; chunks in memory take
    none."""

    prefill: float | None
    """Seconds to compute all of their tokens as one text, T_prefill(L)."""

    overlaps: bool = True
    """True if computation and loading can run concurrently; otherwise one follows the other."""

    @property
    def worth_loading(self) -> bool:
        """True if loading takes no longer than computing everything."""
        return self.load is not None and self.prefill is not None and self.load <= self.prefill

    def hidden_percent(self, least: float) -> float:
        """Return the percent of tokens that can be computed again while the chunks are loaded, at
        no cost in time.

        It is at least ``least`` (CacheBlend, section 5.1): the r with r · T_prefill = T_load, then
        max(r, r*), at most 100. Loading that overlaps with nothing hides nothing: the result is
        ``least`` then, unless it would be quicker to compute everything.
        """
        if self.load is None or not self.prefill:
            return least
        percent = 100 * (self.load / self.prefill)
        if not self.overlaps:
            return 100.0 if percent + least > 100 else least
        return min(100.0, max(percent, least))


@dataclass(frozen=True, slots=True)
class Variant:
    """A chunk whose KV was computed after ``chunk.prefix``, and how that KV depends on the chunks
    in there."""

    chunk: Chunk
    contextualization: Contextualization


class Library(Protocol):
    """Finds stored KV of chunks."""

    def variants(self, chunk: Chunk) -> Sequence[Variant]:
        """Return the variants with the same tokens as ``chunk``, besides itself."""

    def has(self, chunk: Chunk) -> bool:
        """Return whether the KV of this very chunk is stored."""


class EmptyLibrary:
    """A ``Library`` that holds nothing."""

    def variants(self, chunk: Chunk) -> Sequence[Variant]:
        return ()

    def has(self, chunk: Chunk) -> bool:
        return False
