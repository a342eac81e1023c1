"""The KV of chunks while vLLM's model computes it: keys before their rotary embedding, slice by slice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engine.attention import AttentionOptions
from kvlinker.engine.observation import ScoreCollector
from kvlinker.store import ChunkKV, LayerKV
from kvlinker.types.chunk_scores import ChunkScores
from kvlinker.types.chunks import content_of
from kvlinker.vllm.adapter import BoundModel, watched
from kvlinker.vllm.protocol.transfer_plan import CapturedChunk
from kvlinker.vllm.worker.anatomy import LinkedLayer


class Capture:
    """One chunk at positions [begin, end) of a request, this worker's heads of it, with its scores if wanted."""

    def __init__(
        self,
        chunk: CapturedChunk,
        tokens: NDArray[np.int64],
        layers: Sequence[LinkedLayer],
        dtype: torch.dtype,
        *,
        with_scores: bool,
    ) -> None:
        """``tokens`` are the request's."""
        self.chunk = chunk
        length = chunk.end - chunk.begin
        shapes = [(layer.attention.heads, length, layer.attention.head_dim) for layer in layers]
        self._kv = [(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)) for shape in shapes]
        self._scores: ScoreCollector | None = None
        if with_scores:
            content = content_of(tokens[chunk.begin : chunk.end].astype("<u4").tobytes())
            self._scores = ScoreCollector(len(layers), [(chunk.begin, chunk.end)], [content])
            self._rotated: list[list[Tensor]] = [[] for _ in layers]  # keys [heads, tokens, head_dim], slice by slice

    def note(self, layer: int, begin: int, key: Tensor, value: Tensor) -> None:
        """Keys, before their rotary embedding, and values [tokens, heads, head_dim] of the positions from ``begin``
        on."""
        first = max(begin, self.chunk.begin)
        last = min(begin + len(key), self.chunk.end)
        if first < last:
            for kept, new in zip(self._kv[layer], (key, value), strict=True):
                own = new[first - begin : last - begin].transpose(0, 1)
                kept[:, first - self.chunk.begin : last - self.chunk.begin].copy_(own)

    def observe(self, layer: int, begin: int, query: Tensor, key: Tensor, options: AttentionOptions) -> None:
        """Queries and keys [tokens, heads, head_dim] with their rotary embedding; a request's slices come in order."""
        if self._scores is not None:
            earlier = self._rotated[layer]
            earlier.append(key.transpose(0, 1).clone())
            self._scores.observe(layer, begin, query.transpose(0, 1), torch.cat(earlier, dim=1), options)

    def finish(self, bound: BoundModel) -> ChunkKV:
        """The chunk with all workers' heads, which all of them have to ask for."""
        layers = tuple(
            LayerKV(*(bound.gather_heads(part.to(bound.device)).cpu() for part in layer)) for layer in self._kv
        )
        return ChunkKV(layers, None if self._scores is None else _averaged(bound, *self._scores.finish()))


def _averaged(bound: BoundModel, scores: ChunkScores) -> ChunkScores:
    """Every worker has the mean over its own heads."""
    known = scores.contextualization
    values = np.stack([scores.inter, scores.received]).astype(np.float32)
    intra = torch.tensor([known.intra], dtype=torch.float32, device=bound.device)
    inter, received = bound.mean_over_workers(torch.from_numpy(values).to(bound.device)).cpu().numpy()
    own = replace(known, intra=float(bound.mean_over_workers(intra)))
    return ChunkScores(own, inter=inter, received=received)


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """Rows [first, first + count) of a pass are the positions from ``begin`` on of a request with these captures."""

    first: int
    count: int
    begin: int
    captures: Sequence[Capture]


@contextmanager
def capturing(bound: BoundModel, layers: Sequence[LinkedLayer], rows: Sequence[CapturedRows]) -> Iterator[None]:
    """Have a pass by the modules note its KV."""
    index_of = {layer.attention.name: index for index, layer in enumerate(layers)}
    unrotated: list[Tensor] = []

    def rotated(_: object, __: Tensor, key: Tensor) -> None:
        unrotated.append(key.clone())  # the embedding may be written in place

    def attended(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        index = index_of[name]
        attention = layers[index].attention
        shape = (-1, attention.heads, attention.head_dim)
        plain = (unrotated.pop() if unrotated else key).reshape(shape)
        queries = query.reshape(-1, attention.query_heads, attention.head_dim)
        keys, values = key.reshape(shape), value.reshape(shape)
        for part in rows:
            own = slice(part.first, part.first + part.count)
            for capture in part.captures:
                capture.note(index, part.begin, plain[own], values[own])
                capture.observe(index, part.begin, queries[own], keys[own], attention.options)

    with watched(bound, rotated=rotated, attended=attended):
        yield
