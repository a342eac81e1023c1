"""Observers of attention while it is computed: they see the weights of some queries at a time, mean
over heads, never the whole matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from kvlinker.base.types.chunk_scores import ChunkScores, ContextChunk, Contextualization
from kvlinker.prompting.segments import ChunkSpan

QUERIES_AT_ONCE = 512
"""The most queries whose weights are asked for at once."""

BY_HEAD_AT_ONCE = 64
"""The most queries whose weights are in memory at once for each head."""


Weights = Callable[[int, int], Tensor]
"""Computes the attention weights of a run's queries [first, last), mean over heads: [queries,
positions up to the last one's], fp32."""


def mean_over_heads(by_head: Weights, first: int, last: int) -> Tensor:
    """Compute what ``Weights`` does by a function that returns the weights of each head: [heads,
    queries, positions up to the last one's]."""
    means = [
        by_head(begin, min(begin + BY_HEAD_AT_ONCE, last)).mean(0)
        for begin in range(first, last, BY_HEAD_AT_ONCE)
    ]
    length = means[-1].shape[1]
    return torch.cat([pad(each, (0, length - each.shape[1])) for each in means])


class Observer(Protocol):
    """Called with every run of its request in every layer, when the run's keys are computed."""

    def observe(self, layer: int, start: int, tokens: int, weights: Weights) -> None:
        """Observe one run of ``tokens`` at the positions from ``start`` on in one layer, whose
        ``weights`` are computed for those who ask."""


@dataclass(frozen=True, slots=True, eq=False)
class QuestionProbe:
    """Records the last prompt token's attention on every token."""

    attention: NDArray[np.float32]
    """The attention so far: [layers, length], mean over heads; zeros at first."""

    def observe(self, layer: int, start: int, tokens: int, weights: Weights) -> None:
        if start + tokens == self.attention.shape[1]:
            self.attention[layer] = weights(tokens - 1, tokens)[0].cpu().numpy()


class Observers:
    """Shows the same runs to several observers."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def observe(self, layer: int, start: int, tokens: int, weights: Weights) -> None:
        for observer in self._observers:
            observer.observe(layer, start, tokens, weights)


class ChunkWatch:
    """Records the attention of the question (the tokens after the last chunk) on every chunk, layer
    by layer. It is the ``ChunkAttention`` that a ``Refinement`` takes."""

    def __init__(self, spans: Sequence[ChunkSpan], length: int) -> None:
        self._spans = tuple(spans)
        self._question = min(max((span.end for span in spans), default=0), length - 1)
        self._attention: list[NDArray[np.float32]] = []
        self._wanted_in = -1

    @property
    def attention(self) -> NDArray[np.float32]:
        """The attention so far: [layers so far, chunks], sum over the question's tokens, mean over
        heads."""
        return np.array(self._attention, dtype=np.float32).reshape(
            len(self._attention), len(self._spans)
        )

    def want(self, layer: int) -> None:
        """Watch this layer, too. Watching ends with the first layer that no policy asks for."""
        self._wanted_in = layer

    def observe(self, layer: int, start: int, tokens: int, weights: Weights) -> None:
        if (
            start + tokens <= self._question
            or layer != self._wanted_in
            or layer > len(self._attention)
        ):
            return
        if layer == len(self._attention):
            self._attention.append(np.zeros(len(self._spans), dtype=np.float32))
        begin = max(self._question, start)
        for _, found in _in_blocks(start, begin, start + tokens, weights):
            received = found.sum(0)
            self._attention[layer] += [
                float(received[span.start : span.end].sum()) for span in self._spans
            ]


class ScoreCollector:
    """Collects the ``ChunkScores`` of the chunks in a sequence that is computed as a whole."""

    def __init__(
        self,
        layers: int,
        spans: Sequence[tuple[int, int]],
        contents: Sequence[str],
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        """Begin for chunks at the positions [start, end) of ``spans``, ascending, that have these
        ``contents``. Scores are summed up on ``device``; that of the weights spares a copy of
        each."""
        self._layers = layers
        self._spans = tuple(spans)
        self._contents = tuple(contents)
        sizes = [end - start for start, end in spans]
        self._inter = [torch.zeros(index, size, device=device) for index, size in enumerate(sizes)]
        self._received = [torch.zeros(size, device=device) for size in sizes]
        self._intra = torch.zeros(len(sizes), dtype=torch.float64, device=device)

    def observe(self, layer: int, start: int, tokens: int, weights: Weights) -> None:
        end = start + tokens
        for index, (first, last) in enumerate(self._spans):
            begin, stop = max(start, first), min(end, last)
            if begin < stop:
                for position, found in _in_blocks(start, begin, stop, weights):
                    self._note(index, position, found.to(self._inter[index].device))

    def finish(self) -> list[ChunkScores]:
        """Return the scores of every chunk, once all layers have seen all tokens."""
        finished = []
        for index, (first, last) in enumerate(self._spans):
            inter = self._inter[index].cpu() / self._layers
            context = tuple(
                ContextChunk(content, end - begin, float(attention.sum()))
                for content, (begin, end), attention in zip(
                    self._contents, self._spans, inter, strict=False
                )
            )
            finished.append(
                ChunkScores(
                    Contextualization(
                        last - first, float(self._intra[index]) / self._layers, context
                    ),
                    inter=inter.sum(0).numpy(),
                    received=(self._received[index].cpu() / self._layers).numpy(),
                )
            )
        return finished

    def _note(self, index: int, position: int, weights: Tensor) -> None:
        """Add the ``weights`` [queries, position + queries] of chunk ``index``'s tokens from
        ``position`` on."""
        first, _ = self._spans[index]
        tokens = slice(position - first, position - first + len(weights))
        for earlier, (begin, end) in enumerate(self._spans[:index]):
            self._inter[index][earlier, tokens] += weights[:, begin:end].sum(1)
        own = weights[:, first:]
        self._intra[index] += own.sum() - own.diagonal(position - first).sum()
        self._received[index][: own.shape[1]] += own.sum(0)


def _in_blocks(start: int, begin: int, end: int, weights: Weights) -> Iterator[tuple[int, Tensor]]:
    """Yield blocks of the queries at positions [begin, end) of a run that begins at ``start``: the
    first one's position, and their weights [queries, positions up to the last one's]."""
    for first in range(begin, end, QUERIES_AT_ONCE):
        last = min(first + QUERIES_AT_ONCE, end)
        yield first, weights(first - start, last - start)
