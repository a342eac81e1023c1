"""Records from passes of vLLM's model: the KV of chunks, and the deviation of computed from placed
KV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.base.types.chunk_scores import ChunkScores
from kvlinker.base.types.chunks import content_of
from kvlinker.engines.contract.attention import Queries, attention_weights
from kvlinker.engines.contract.observation import ScoreCollector
from kvlinker.engines.vllm.adapter import AttentionLayer, BoundModel, watched
from kvlinker.engines.vllm.protocol.transfer_plan import COMPARED_LAYER, CapturedChunk, KVDeviation
from kvlinker.engines.vllm.worker.layers import ChunkPart, placed_kv
from kvlinker.store import ChunkKV, LayerKV
from kvlinker.store.memory.to_host import copy_to_host, host_room

CPU = torch.device("cpu")
FIRST_LAYERS = slice(0, COMPARED_LAYER)
"""The layers that a comparing pass goes through."""


class ChunkCapture:
    """Collects the KV of one chunk at positions [begin, end) of a request slice by slice, this
    worker's heads of it: keys before their rotary embedding, and the chunk's scores if wanted."""

    def __init__(
        self,
        chunk: CapturedChunk,
        tokens: NDArray[np.int64],
        layers: Sequence[AttentionLayer],
        dtype: torch.dtype,
        *,
        with_scores: bool,
        device: torch.device = CPU,
    ) -> None:
        """``tokens`` [linked] are the request's, ``device`` the model's."""
        self.chunk = chunk
        length = chunk.end - chunk.begin
        room = partial(host_room, dtype=dtype, device=device)
        self._attentions = layers
        self._kv = [
            (room((length, each.heads, each.key_dim)), room((length, each.heads, each.value_dim)))
            for each in self._attentions
        ]
        self._scores: ScoreCollector | None = None
        if with_scores:
            content = content_of(tokens[chunk.begin : chunk.end].astype("<u4").tobytes())
            self._scores = ScoreCollector(
                len(layers), [(chunk.begin, chunk.end)], [content], device=device
            )
            self._asked: list[list[Tensor]] = [
                [] for _ in layers
            ]  # what queries are multiplied by, [heads, tokens, dim], slice by slice

    def note(self, layer: int, begin: int, key: Tensor, value: Tensor) -> None:
        """Keep the keys, before their rotary embedding, and values [tokens, heads, dim] of the
        positions from ``begin`` on."""
        first = max(begin, self.chunk.begin)
        last = min(begin + len(key), self.chunk.end)
        if first < last:
            for kept, new in zip(self._kv[layer], (key, value), strict=True):
                room = kept[first - self.chunk.begin : last - self.chunk.begin]
                copy_to_host(room, new[first - begin : last - begin])

    def observe(self, layer: int, begin: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Score by a call's query [tokens, …] and by keys and values [tokens, heads, dim], with
        their rotary embedding; a request's slices come in order."""
        if self._scores is not None:
            attention, earlier = self._attentions[layer], self._asked[layer]
            earlier.append(attention.asked(key, value).transpose(0, 1).clone())
            keys = torch.cat(earlier, dim=1)
            queries, options = attention.queries(query).transpose(0, 1), attention.options

            def weights(first: int, last: int) -> Tensor:
                positions = Queries(torch.arange(begin + first, begin + last))
                return attention_weights(
                    positions, queries[:, first:last], keys[:, : positions.last + 1], options
                )

            self._scores.observe(layer, begin, len(query), weights)

    def finish(self, bound: BoundModel) -> ChunkKV:
        """Return the chunk with the heads of all workers, which all have to ask for it."""
        bound.finish_copies()
        layers = tuple(
            LayerKV(*(bound.gather_heads(part.transpose(0, 1)).contiguous() for part in layer))
            for layer in self._kv
        )
        return ChunkKV(
            layers, None if self._scores is None else _averaged(bound, *self._scores.finish())
        )


def _averaged(bound: BoundModel, scores: ChunkScores) -> ChunkScores:
    """Average the scores over all workers, each of which has the mean over its own heads."""
    known = scores.contextualization
    values = np.stack([scores.inter, scores.received]).astype(np.float32)
    intra = torch.tensor([known.intra], dtype=torch.float32, device=bound.device)
    inter, received = (
        bound.mean_over_workers(torch.from_numpy(values).to(bound.device)).cpu().numpy()
    )
    own = replace(known, intra=float(bound.mean_over_workers(intra)))
    return ChunkScores(own, inter=inter, received=received)


class KVComparison:
    """Collects the deviation of the KV of a request's first ``length`` tokens, as computed in the
    compared layer, from that of chunks: the measure that CacheBlend chooses by (CacheBlend, section
    4.3). Has this worker's heads only."""

    def __init__(self, layers: Sequence[AttentionLayer], length: int, device: torch.device) -> None:
        self._attention = layers[COMPARED_LAYER]
        self._squares = torch.zeros(2, length, device=device)

    def note(self, position: int, part: int, new: Tensor, placed: Tensor) -> None:
        """Compare keys (``part`` 0) or values (1) [tokens, heads, dim] from ``position`` on."""
        distances = (new.float() - placed.float()).square_().sum(dim=(1, 2))
        self._squares[part, position : position + len(distances)] = distances

    def finish(self, bound: BoundModel) -> bytes:
        """Return the ``KVDeviation`` over the heads of all workers, which all have to ask for
        it."""
        mean = bound.mean_over_workers(self._squares).cpu()
        key, value = (mean * (self._attention.total_heads / self._attention.heads)).numpy()
        return KVDeviation(key, value).to_bytes()


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """Rows [first, first + count) of a pass, which are the positions from ``begin`` on of a request
    that captures."""

    first: int
    count: int
    begin: int
    captures: Sequence[ChunkCapture]


@dataclass(frozen=True, slots=True)
class ComparedRows:
    """Rows of a pass from ``first`` on, which are the positions from ``begin`` on of a request that
    compares, where the ``parts`` of chunks belong."""

    first: int
    begin: int
    parts: Sequence[ChunkPart]
    comparison: KVComparison


@contextmanager
def capturing(
    bound: BoundModel, layers: Sequence[AttentionLayer], rows: Sequence[CapturedRows]
) -> Iterator[None]:
    """Have a pass by the modules give its KV to the rows' captures."""
    index_of = {layer.name: index for index, layer in enumerate(layers)}
    unrotated: list[Tensor] = []

    def rotated(_: object, __: Tensor, key: Tensor) -> None:
        unrotated.append(key)

    def attended(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        index = index_of[name]
        attention = layers[index]
        keys, values = attention.by_heads(key, value)
        plain = unrotated.pop().reshape(keys.shape) if unrotated else keys
        queries = query.reshape(len(keys), -1)
        for part in rows:
            own = slice(part.first, part.first + part.count)
            for capture in part.captures:
                capture.note(index, part.begin, plain[own], values[own])
                capture.observe(index, part.begin, queries[own], keys[own], values[own])

    with watched(bound, rotated=rotated, attended=attended):
        yield


class _PassIsOver(Exception):  # noqa: N818  # no error
    """Raised to end a pass by the modules early."""


@contextmanager
def comparing(
    bound: BoundModel, layers: Sequence[AttentionLayer], rows: Sequence[ComparedRows]
) -> Iterator[None]:
    """Pass the KV of a pass by the modules to the rows' comparisons, and end the pass as soon as
    they have it."""
    attention = layers[COMPARED_LAYER]

    def attended(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        if name != attention.name:
            return
        new = attention.by_heads(key, value)
        for each in rows:
            for part in each.parts:
                first = each.first + part.begin - each.begin
                own = slice(first, first + part.last - part.first)
                for index, placed in enumerate(placed_kv(attention, COMPARED_LAYER, [part])):
                    each.comparison.note(part.begin, index, new[index][own], placed)
        raise _PassIsOver

    with suppress(_PassIsOver), watched(bound, rotated=lambda *_: None, attended=attended):
        yield
