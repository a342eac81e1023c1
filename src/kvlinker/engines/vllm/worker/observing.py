"""Observes the question's attention on placed and computed tokens in a first pass of vLLM's
model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlinker.engines.contract.attention import Queries, attention_weights
from kvlinker.engines.vllm.adapter import AttentionLayer, BoundModel, watched
from kvlinker.engines.vllm.protocol.transfer_plan import QuestionAttention
from kvlinker.engines.vllm.worker.layers import ChunkPart, asked_kv, placed_kv


class QuestionObservation:
    """Collects the attention of a request's last token on all of its ``length`` tokens, layer by
    layer. Has this worker's heads only."""

    def __init__(self, layers: Sequence[AttentionLayer], length: int) -> None:
        self.unplaced: tuple[ChunkPart, ...] = ()
        """All chunks of the request where the pass itself is to place them, so that their keys are
        copied once."""

        self._layers = layers
        self._length = length
        self._computed: list[list[tuple[int, Tensor]]] = [[] for _ in layers]
        self._weights: list[Tensor] = []

    def note(self, layer: int, begin: int, key: Tensor) -> None:
        """Keep what queries are multiplied by of computed tokens, [tokens, heads, dim], with its
        rotary embedding, of the positions from ``begin`` on."""
        self._computed[layer].append((begin, key.clone()))

    def ask(self, layer: int, query: Tensor, parts: Sequence[ChunkPart]) -> None:
        """Weigh all positions by the last token's ``query`` [heads, dim], once all others' keys
        are noted.

        ``parts`` are all chunks of the request; those that are unplaced are placed, before the
        layer attends.
        """
        attention = self._layers[layer]
        keys = query.new_empty(
            (attention.heads, self._length, query.shape[-1])
        )  # as a matrix product reads them
        placed = self._placed_keys(layer, parts).transpose(0, 1)
        begin = 0
        for part in parts:
            count = part.last - part.first
            keys[:, part.begin : part.begin + count] = placed[:, begin : begin + count]
            begin += count
        for position, computed in self._computed[layer]:
            keys[:, position : position + len(computed)] = computed.transpose(0, 1)
        self._computed[layer].clear()
        last = Queries(torch.tensor([self._length - 1]))
        weights = attention_weights(last, query[:, None], keys, attention.options)
        self._weights.append(weights.mean(0)[0])

    def _placed_keys(self, layer: int, parts: Sequence[ChunkPart]) -> Tensor:
        if not self.unplaced:
            return asked_kv(self._layers[layer], layer, parts)
        attention = self._layers[layer]
        key, value = placed_kv(attention, layer, parts)
        attention.write(key, value, torch.cat([part.slots for part in parts]))
        return attention.asked(key, value)

    def finish(self, bound: BoundModel) -> bytes:
        """Return the ``QuestionAttention`` over the heads of all workers, which all have to ask for
        it."""
        return QuestionAttention(
            bound.mean_over_workers(torch.stack(self._weights)).cpu().numpy()
        ).to_bytes()


@dataclass(frozen=True, slots=True)
class ObservedRows:
    """Rows [first, first + count) of a pass, which are the positions from ``begin`` on of a request
    that observes. The last row is the request's last token where there are ``parts``, its placed
    chunks."""

    first: int
    count: int
    begin: int
    parts: Sequence[ChunkPart]
    observation: QuestionObservation


@contextmanager
def observing(
    bound: BoundModel, layers: Sequence[AttentionLayer], rows: Sequence[ObservedRows]
) -> Iterator[None]:
    """Have a pass by the modules give its keys and the last tokens' queries to the rows'
    observations."""
    index_of = {layer.name: index for index, layer in enumerate(layers)}

    def attended(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        index = index_of[name]
        attention = layers[index]
        asked = attention.asked(*attention.by_heads(key, value))
        queries = query.reshape(len(asked), -1)
        for each in rows:
            end = each.first + each.count
            each.observation.note(index, each.begin, asked[each.first : end])
            if each.parts:
                (last,) = attention.queries(queries[end - 1 : end])
                each.observation.ask(index, last, each.parts)

    with watched(bound, rotated=lambda *_: None, attended=attended):
        yield
