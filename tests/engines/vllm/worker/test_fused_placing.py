"""Placing by one kernel, interpreted, into caches as vLLM's backends on GPUs lay them out."""

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("triton")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from kvlinker.engines.gpu import launching
from kvlinker.engines.vllm.adapter import AttentionLayer
from kvlinker.engines.vllm.worker import fused_placing
from kvlinker.engines.vllm.worker.fused_placing import FusedPlacing
from kvlinker.engines.vllm.worker.layers import AttentionModules, ChunkPart, place
from kvlinker.store import ChunkKV, LayerKV

HEADS, DIM, BLOCKS, BLOCK_SIZE = 2, 16, 6, 16
FIRST_HEAD, TOTAL_HEADS = 2, 4
"""This worker has the second half of the heads."""


def heads_last(cache):
    """As FlashAttention's: [blocks, heads, block_size, 2 * dim]."""
    return cache.transpose(1, 2).split(DIM, dim=-1)


def values_behind(cache):
    """As FlashInfer's where heads come first: [blocks, 2 * heads, block_size, dim]."""
    return cache.transpose(1, 2).split(HEADS, dim=2)


def mirrored(cache):
    """As nobody's."""
    key, value = heads_last(cache)
    return key.flip(-1), value


SHAPES = {
    heads_last: (BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM),
    values_behind: (BLOCKS, 2 * HEADS, BLOCK_SIZE, DIM),
    mirrored: (BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM),
}


class Backend:
    """Writes slot by slot, as vLLM's own update does."""

    def __init__(self, layout):
        self.layout = layout

    def do_kv_cache_update(self, _, key, value, cache, slots):
        if self.layout is mirrored:
            key = key.flip(-1)
        keys, values = heads_last(cache) if self.layout is mirrored else self.layout(cache)
        for token, slot in enumerate(slots.tolist()):
            keys[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = key[token]
            values[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = value[token]


def worker(layout, dtype=torch.float32, **changes):
    """A worker's model, and its layers: two with one rotary embedding, one with another, one with
    none."""
    facts = {
        "device": torch.device("cpu"),
        "dtype": dtype,
        "has_rounded_cache": False,
        "max_model_len": 256,
        "to_device": lambda values: values,
    }
    with set_current_vllm_config(VllmConfig()):
        rope: Any = {"rope_type": "default", "rope_theta": 10000.0}
        halves = get_rope(DIM, 256, is_neox_style=True, rope_parameters=rope, dtype=dtype)
        pairs = get_rope(DIM, 256, is_neox_style=False, rope_parameters=rope, dtype=dtype)
    layers = []
    halves, pairs = copy.deepcopy((halves, pairs))  # vLLM keeps what it makes
    for index, rotary in enumerate((halves, pairs, halves, None)):
        cache = torch.zeros(SHAPES[layout], dtype=dtype)
        module = SimpleNamespace(impl=Backend(layout), kv_cache=cache)
        attention = AttentionLayer(f"layer {index}", module, HEADS, DIM, FIRST_HEAD, TOTAL_HEADS)
        layers.append(AttentionModules(attention, rotary))
    return SimpleNamespace(**facts | changes), layers


@pytest.fixture
def launches(monkeypatch):
    """The CPU passes for a GPU; (layers, parts) of each launch are noted."""
    found = []
    launch = launching.place_kv

    def noted(sources, *args, **options):
        found.append((len(sources), len(sources[0])))
        launch(sources, *args, **options)

    monkeypatch.setattr(fused_placing, "has_kernels", lambda _: True)
    monkeypatch.setattr(launching, "place_kv", noted)
    return found


def chunk_part(tokens, first, last, start, slots):
    layers = [torch.randn(2, TOTAL_HEADS, tokens, DIM) for _ in range(4)]
    positions = torch.arange(first, last) + start
    kv = ChunkKV(tuple(LayerKV(*pair) for pair in layers))
    return ChunkPart(kv, first, last, start, positions, slots)


@pytest.mark.parametrize("layout", [heads_last, values_behind])
def test_all_chunks_are_placed_by_a_launch_for_each_rotary_embedding(layout, launches):
    bound, layers = worker(layout)
    placing = fused_placing.fused_placing(bound, layers)
    assert placing is not None
    assert not any(layer.attention.module.kv_cache.any() for layer in layers)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)
    parts = [
        chunk_part(40, 3, 40, 20, slots[:37]),
        chunk_part(9, 0, 9, 100, slots[37:46]),
        chunk_part(9, 2, 3, -2, slots[46:47]),
    ]
    found = []
    for by in (lambda parts: place(layers, parts), placing.place):
        for layer in layers:
            layer.attention.module.kv_cache.fill_(7.0)
        launches.clear()
        by(parts)
        found.append([layer.attention.module.kv_cache.clone() for layer in layers])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert sorted(launches) == [(1, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize(
    ("layout", "changes", "told"),
    [
        (mirrored, {}, "layer 0 is laid out in another way"),
        (heads_last, {"has_rounded_cache": True}, "another precision"),
    ],
)
def test_caches_of_other_kinds_are_left_to_vllm(layout, changes, told, launches, caplog):
    with caplog.at_level(logging.INFO):
        assert fused_placing.fused_placing(*worker(layout, **changes)) is None
    assert told in caplog.text


def test_a_rotary_embedding_with_other_tables_is_left_to_vllm(launches, caplog):
    bound, layers = worker(heads_last)
    layers[1].rotary.cos_sin_cache = layers[1].rotary.cos_sin_cache.roll(1, 0)
    layers[1].rotary.forward_cpu = lambda positions, query, key: (
        query,
        layers[0].rotary.forward_cpu(positions, query, key)[1],
    )
    with caplog.at_level(logging.INFO):
        assert fused_placing.fused_placing(bound, layers) is None
    assert "places something else" in caplog.text


class Event:
    """A point of a stream that the device has come to once ``done``."""

    def __init__(self):
        self.recorded = self.done = False

    def record(self):
        self.recorded = True

    def query(self):
        assert self.recorded
        return self.done


def test_chunks_stay_in_memory_until_the_device_has_read_them(launches):
    placing = FusedPlacing(*worker(heads_last))
    kvs = [chunk_part(9, 0, 9, 0, torch.arange(9)).kv for _ in range(3)]
    events = [Event() for _ in kvs]
    for kv, event in zip(kvs, events, strict=True):
        placing._hold([kv], event)  # type: ignore[arg-type]
    assert [kv for _, (kv,) in placing._running] == kvs
    events[0].done = True
    placing._hold([kvs[0]], Event())  # type: ignore[arg-type]
    assert [kv for _, (kv,) in placing._running] == [*kvs[1:], kvs[0]]
