"""What is recorded of a pass stays as it was when the next pass overwrites its buffers, as replays
of CUDA graphs and vLLM's own input buffers do."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from kvlinker.store import ChunkKV, LayerKV
from kvlinker_vllm.adapter import AttentionLayer
from kvlinker_vllm.protocol.transfer_plan import (
    COMPARED_LAYER,
    CapturedChunk,
    unpack_figures,
)
from kvlinker_vllm.worker.layers import ChunkPart, trace_layers
from kvlinker_vllm.worker.observing import QuestionObservation
from kvlinker_vllm.worker.recording import (
    ChunkCapture,
    KVComparison,
    RecordedRows,
    record_attention,
)

HEADS, DIM, LAYERS, LENGTH, MOST = 2, 8, 2, 12, 16
CUT = 7
"""The prompt is computed in two passes, up to here and from here on."""


class Rotary(nn.Module):
    """Turns the keys where they lie, as vLLM's kernel does."""

    def forward(self, positions, query, key):
        key += positions[:, None]
        return query, key


class Attention(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.layer_name = name
        self.num_heads, self.sliding_window = HEADS, None
        self.impl = SimpleNamespace(scale=DIM**-0.5)

    def forward(self, query, key, value):
        return query


class Replayed(nn.Module):
    """A model whose tensors are views of the same few buffers in every pass."""

    def __init__(self, fresh):
        """``fresh``: every pass has memory of its own instead."""
        super().__init__()
        self.fresh = fresh
        self.rotary = nn.ModuleList(Rotary() for _ in range(LAYERS))
        self.attention = nn.ModuleList(Attention(f"layer {n}") for n in range(LAYERS))
        self.buffers_of = [torch.zeros(MOST, HEADS * DIM) for _ in range(3 * LAYERS)]
        self.positions = torch.zeros(MOST, dtype=torch.int64)

    def forward(self, first, last):
        buffers = self.buffers_of
        positions = self.positions
        if self.fresh:
            buffers = [torch.zeros_like(buffer) for buffer in buffers]
            positions = torch.zeros_like(positions)
        count = last - first
        positions[:count] = torch.arange(first, last)
        for layer in range(LAYERS):
            query, key, value = (buffer[:count] for buffer in buffers[3 * layer : 3 * layer + 3])
            for number, buffer in enumerate((query, key, value)):
                buffer.copy_(true_heads(layer, number)[first:last])
            self.rotary[layer](positions[:count], query, key)
            self.attention[layer](query, key, value)


def true_heads(layer, number):
    """Queries, keys or values of the prompt, before they are turned."""
    generator = torch.Generator().manual_seed(10 * layer + number)
    return torch.randn(LENGTH, HEADS * DIM, generator=generator)


def worker(*, fresh):
    model = Replayed(fresh)
    layers = tuple(
        AttentionLayer(str(part.layer_name), part, HEADS, DIM, DIM, 0, HEADS)
        for part in model.attention
    )
    bound: Any = SimpleNamespace(
        model=model,
        layers=layers,
        device=torch.device("cpu"),
        dtype=torch.float32,
        trace=lambda: model(0, 4),
        gather_heads=lambda heads: heads,
        mean_over_workers=lambda values: values,
    )
    return bound, trace_layers(bound)


def overwrite(bound):
    """What the next pass does, whatever it computes."""
    for buffer in bound.model.buffers_of:
        buffer.fill_(float("nan"))
    bound.model.positions.fill_(-1)


def captured(bound, layers):
    tokens = np.arange(LENGTH)
    chunk = CapturedChunk(key="0" * 64, begin=2, end=LENGTH)
    capture = ChunkCapture([chunk], tokens, layers, bound, with_scores=True)
    for first, last in ((0, CUT), (CUT, LENGTH)):
        with record_attention(bound, layers, [RecordedRows(0, last - first, first, capture)]):
            bound.model(first, last)
        overwrite(bound)
    (kv,) = capture.finish()
    assert kv.scores is not None
    return [*(tensor for layer in kv.layers for tensor in (layer.key, layer.value))], kv.scores


def test_captured_chunks_stay_as_they_were():
    (ours, scores), (expected, expected_scores) = (
        captured(*worker(fresh=fresh)) for fresh in (False, True)
    )
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    for layer in range(LAYERS):
        key = true_heads(layer, 1)[2:].view(-1, HEADS, DIM).transpose(0, 1)
        torch.testing.assert_close(ours[2 * layer], key)
    np.testing.assert_array_equal(scores.received, expected_scores.received)
    np.testing.assert_array_equal(scores.inter, expected_scores.inter)
    assert np.isfinite(scores.received).all()


def parts_of(first, last):
    """A chunk whose keys and values are not the prompt's, at these positions."""
    layers = [LayerKV(*torch.ones(2, HEADS, last - first, DIM)) for _ in range(LAYERS)]
    positions = torch.arange(first, last)
    return ChunkPart(ChunkKV(tuple(layers)), 0, last - first, first, positions, positions)


def observed(bound, layers):
    observation = QuestionObservation(layers, LENGTH, bound)
    part = parts_of(3, 5)
    runs = [(0, 3, ()), (5, CUT, ()), (CUT, LENGTH, (part,))]
    for first, last, parts in runs:
        rows = RecordedRows(0, last - first, first, observation, parts)
        with record_attention(bound, layers, [rows]):
            bound.model(first, last)
        overwrite(bound)
    return torch.stack(observation._weights)


def test_observed_keys_stay_as_they_were():
    weights = [observed(*worker(fresh=fresh)) for fresh in (False, True)]
    assert torch.isfinite(weights[0]).all()
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def compared(bound, layers):
    comparison = KVComparison(layers, LENGTH, bound)
    for first, last in ((0, CUT), (CUT, LENGTH)):
        parts = (parts_of(first, last),)
        rows = RecordedRows(0, last - first, first, comparison, parts)
        with record_attention(bound, layers, [rows], until=COMPARED_LAYER):
            bound.model(first, last)
        overwrite(bound)
    return unpack_figures(comparison.finish(), tokens=LENGTH)


def test_compared_deviations_stay_as_they_were():
    ours, expected = (compared(*worker(fresh=fresh)) for fresh in (False, True))
    assert np.isfinite(ours).all()
    np.testing.assert_array_equal(ours, expected)
