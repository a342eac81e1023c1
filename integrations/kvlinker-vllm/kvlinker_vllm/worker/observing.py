"""Observes the question's attention on placed and computed tokens in a first pass of vLLM's
model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlinker.engines.contract.attention import attention_weights
from kvlinker_vllm.adapter import AttentionLayer, BoundModel
from kvlinker_vllm.protocol.transfer_plan import pack_figures
from kvlinker_vllm.worker.layers import ChunkPart, placed_kv, query_operands
from kvlinker_vllm.worker.recording import AttentionCall, RecordedRows


class QuestionObservation:
    """Collects the attention of a request's last token on all of its ``length`` tokens, layer by
    layer. Has this worker's heads only."""

    def __init__(self, layers: Sequence[AttentionLayer], length: int, bound: BoundModel) -> None:
        self.unplaced: tuple[ChunkPart, ...] = ()
        """All chunks of the request where the pass itself is to place them, so that their keys are
        copied once."""

        self._bound = bound
        self._layers = layers
        self._length = length
        self._computed: list[list[tuple[int, Tensor]]] = [[] for _ in layers]
        self._weights: list[Tensor] = []

    def record(self, layer: int, rows: RecordedRows, call: AttentionCall) -> None:
        """Keep what queries are multiplied by of computed tokens, and weigh all positions by the
        request's last token, with which the rows have all ``parts``; those that are unplaced are
        placed, before the layer attends."""
        attention, parts = self._layers[layer], rows.parts
        asked = attention.query_operand(call.key, call.value)
        self._computed[layer].append((rows.begin, asked.clone()))
        if not parts:
            return
        (query,) = attention.queries(call.query[-1:])
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
        weights = attention_weights(query[:, None], keys, attention.options)
        self._weights.append(weights.mean(0)[0])

    def _placed_keys(self, layer: int, parts: Sequence[ChunkPart]) -> Tensor:
        attention = self._layers[layer]
        if not self.unplaced:
            return query_operands(attention, layer, parts)
        key, value = placed_kv(attention, layer, parts)
        attention.write(key, value, torch.cat([part.slots for part in parts]))
        return attention.query_operand(key, value)

    def finish(self) -> bytes:
        """Return the attention over the heads of all workers. Every worker calls it."""
        return pack_figures(self._bound.mean_over_workers(torch.stack(self._weights)).cpu().numpy())
