"""Records from passes of vLLM's model: the KV of chunks, and the deviation of computed from placed
KV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.base.types.chunk_scores import ChunkScores
from kvlinker.base.types.chunks import content_of
from kvlinker.engines.contract.attention import attention_weights
from kvlinker.engines.contract.observation import ScoreCollector, mean_over_heads
from kvlinker.store import ChunkKV, LayerKV
from kvlinker.store.memory.to_host import copy_to_host, finish_copies, host_room
from kvlinker_vllm.adapter import AttentionLayer, BoundModel, watch_attention
from kvlinker_vllm.protocol.transfer_plan import COMPARED_LAYER, CapturedChunk, pack_figures
from kvlinker_vllm.worker.layers import ChunkPart, placed_kv


class AttentionCall(NamedTuple):
    """The arguments of attention for some tokens in one layer: queries [tokens, …], keys with their
    rotary embedding and values, and keys before it, [tokens, heads, dim] each."""

    query: Tensor
    key: Tensor
    value: Tensor
    unrotated: Tensor


class Recorder(Protocol):
    """Collects arguments of attention of a request's tokens, run by run in order."""

    def record(self, layer: int, rows: RecordedRows, call: AttentionCall) -> None:
        """Look at one layer's ``call`` with the tokens of the ``rows``."""


@dataclass(frozen=True, slots=True)
class RecordedRows:
    """Rows [first, first + count) of a pass, which are the positions from ``begin`` on of a request
    that records."""

    first: int
    count: int
    begin: int
    recorder: Recorder

    parts: Sequence[ChunkPart] = ()
    """The placed chunks that it looks at besides: those in these rows to compare, all of the
    request's to observe, with its last row."""


class _PassIsOver(Exception):  # noqa: N818  # no error
    """Raised to end a pass by the modules early."""


@contextmanager
def record_attention(
    bound: BoundModel,
    layers: Sequence[AttentionLayer],
    rows: Sequence[RecordedRows],
    *,
    until: int | None = None,
) -> Iterator[None]:
    """Hand the arguments of attention in a pass by the modules to the rows' recorders, and end the
    pass in the layer ``until``, before its attention."""
    index_of = {layer.name: index for index, layer in enumerate(layers)}
    unrotated: list[Tensor] = []

    def rotated(_: object, __: Tensor, key: Tensor) -> None:
        unrotated.append(key)

    def attended(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        index = index_of[name]
        keys, values = layers[index].by_heads(key, value)
        plain = unrotated.pop().reshape(keys.shape) if unrotated else keys
        whole = query.reshape(len(keys), -1), keys, values, plain
        for each in rows:
            call = AttentionCall(*(part[each.first : each.first + each.count] for part in whole))
            each.recorder.record(index, each, call)
        if index == until:
            raise _PassIsOver

    with suppress(_PassIsOver), watch_attention(bound, rotated=rotated, attended=attended):
        yield


class ChunkCapture:
    """Collects the KV of chunks at positions [begin, end) of a request slice by slice, this
    worker's heads of it: keys before their rotary embedding, and a single chunk's scores if
    wanted."""

    def __init__(
        self,
        chunks: Sequence[CapturedChunk],
        tokens: NDArray[np.int64],
        layers: Sequence[AttentionLayer],
        bound: BoundModel,
        *,
        with_scores: bool,
    ) -> None:
        """``tokens`` [linked] are the request's."""
        self.chunks = chunks
        room = partial(host_room, dtype=bound.dtype, device=bound.device)
        self._bound = bound
        self._layers = layers
        self._kv = [
            [
                tuple(
                    room((chunk.end - chunk.begin, layer.heads, dim))
                    for dim in (layer.key_dim, layer.value_dim)
                )
                for layer in layers
            ]
            for chunk in chunks
        ]
        self._scores: ScoreCollector | None = None
        if with_scores:
            (chunk,) = chunks
            content = content_of(tokens[chunk.begin : chunk.end].astype("<u4").tobytes())
            self._scores = ScoreCollector(
                len(layers), [(chunk.begin, chunk.end)], [content], device=bound.device
            )
            self._asked: list[list[Tensor]] = [
                [] for _ in layers
            ]  # what queries are multiplied by, [heads, tokens, dim], slice by slice

    def record(self, layer: int, rows: RecordedRows, call: AttentionCall) -> None:
        """Keep the tokens' keys, before their rotary embedding, and values, and score by them."""
        begin = rows.begin
        for chunk, layers in zip(self.chunks, self._kv, strict=True):
            first, last = max(begin, chunk.begin), min(begin + rows.count, chunk.end)
            if first < last:
                for kept, new in zip(layers[layer], (call.unrotated, call.value), strict=True):
                    room = kept[first - chunk.begin : last - chunk.begin]
                    copy_to_host(room, new[first - begin : last - begin])
        if self._scores is not None:
            attention, earlier = self._layers[layer], self._asked[layer]
            earlier.append(attention.query_operand(call.key, call.value).transpose(0, 1).clone())
            keys = torch.cat(earlier, dim=1)
            queries, options = attention.queries(call.query).transpose(0, 1), attention.options

            def by_head(first: int, last: int) -> Tensor:
                return attention_weights(queries[:, first:last], keys[:, : begin + last], options)

            self._scores.observe(layer, begin, rows.count, partial(mean_over_heads, by_head))

    def finish(self) -> tuple[ChunkKV, ...]:
        """Return the chunks with the heads of all workers. Every worker calls it."""
        bound = self._bound
        finish_copies(bound.device)
        scores = None if self._scores is None else _average(bound, *self._scores.finish())
        return tuple(
            ChunkKV(
                tuple(
                    LayerKV(
                        *(bound.gather_heads(part.transpose(0, 1)).contiguous() for part in layer)
                    )
                    for layer in layers
                ),
                scores,
            )
            for layers in self._kv
        )


def _average(bound: BoundModel, scores: ChunkScores) -> ChunkScores:
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

    def __init__(self, layers: Sequence[AttentionLayer], length: int, bound: BoundModel) -> None:
        self._bound = bound
        self._layer = layers[COMPARED_LAYER]
        self._squares = torch.zeros(2, length, device=bound.device)

    def record(self, layer: int, rows: RecordedRows, call: AttentionCall) -> None:
        """Compare keys and values of the compared layer with those of the placed chunks."""
        for part in rows.parts if layer == COMPARED_LAYER else ():
            own = slice(part.begin - rows.begin, part.begin - rows.begin + part.last - part.first)
            placed = placed_kv(self._layer, layer, [part])
            for squares, new, old in zip(
                self._squares, (call.key, call.value), placed, strict=True
            ):
                distances = (new[own].float() - old.float()).square_().sum(dim=(1, 2))
                squares[part.begin : part.begin + len(distances)] = distances

    def finish(self) -> bytes:
        """Return the ``KVDeviation`` over the heads of all workers. Every worker calls it."""
        mean = self._bound.mean_over_workers(self._squares).cpu()
        return pack_figures((mean * (self._layer.total_heads / self._layer.heads)).numpy())
