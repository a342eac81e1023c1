"""Chunks in pinned memory are whole, and take little more than their size."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.events import Events
from kvlinker.store import ChunkKV, ChunkStore, HostTier, LayerKV
from kvlinker.store.loading.prompt_load import Urgency
from kvlinker.store.memory.pinned import ALIGNMENT, PinnedChunk, pinned
from kvlinker.store.memory.resident import Residence
from tests.store.store_chunks import chunk_kv, key_of, same_kv
from tests.waiting import PATIENCE, wait_until


class Pinning:
    """Pageable memory that passes for pinned: rounded up to a power of two, and counted."""

    def __init__(self):
        self.taken = 0

    def __call__(self, size):
        self.taken += 1 << (size - 1).bit_length()
        return torch.empty(size, dtype=torch.uint8)


@given(
    layers=st.integers(1, 40),
    tokens=st.integers(1, 700),
    heads=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_chunks_are_whole_and_take_little_more_than_their_size(layers, tokens, heads, dtype):
    def random(dim):
        return torch.randn(heads, tokens, dim).to(dtype)

    kv = ChunkKV(tuple(LayerKV(random(16), random(24)) for _ in range(layers)))
    memory = Pinning()
    copy = pinned(kv, memory)
    for ours, theirs in zip(copy.layers, kv.layers, strict=True):
        for one, other in ((ours.key, theirs.key), (ours.value, theirs.value)):
            assert torch.equal(one, other)
            assert one.is_contiguous()
            assert one.storage_offset() * one.itemsize % ALIGNMENT == 0
    largest = max(layer.value.nbytes for layer in kv.layers) + ALIGNMENT
    rounded = 2 * layers * ALIGNMENT
    assert memory.taken <= kv.nbytes + rounded + 12 * largest


def test_less_than_where_each_tensor_is_pinned_alone():
    """300 tokens of 8 heads and 32 layers: 37.5 MiB."""
    empty = torch.empty(8, 300, 128, dtype=torch.bfloat16)
    kv = ChunkKV((LayerKV(empty, empty),) * 32)
    alone, together = Pinning(), Pinning()
    for tensor in (empty,) * 64:
        alone(tensor.nbytes)
    pinned(kv, together)
    assert alone.taken > 1.7 * kv.nbytes
    assert together.taken < 1.05 * kv.nbytes


def test_latents_stay_side_by_side():
    joined = torch.randn(1, 7, 24)
    (copy,) = pinned(ChunkKV((LayerKV.of_joined(joined, 16),)), Pinning()).layers
    assert copy.is_joined
    assert torch.equal(copy.joined, joined)


def test_layers_stay_where_they_are_once_no_more_memory_can_be_pinned(caplog):
    blocks = iter([torch.empty(512, dtype=torch.uint8)])

    def allocate(size):
        for block in blocks:
            return block
        raise RuntimeError("cudaHostAlloc: out of memory")

    layer = LayerKV(torch.randn(1, 4, 16), torch.randn(1, 4, 16))
    memory = PinnedChunk(2, allocate)
    assert memory.take(layer).key is not layer.key
    assert memory.take(layer) is layer
    assert "cudaHostAlloc" in caplog.text


def test_a_store_pins_what_is_put_and_what_is_read_layer_by_layer():
    """Slower tiers keep what was computed."""
    made = []

    def pins(layers):
        made.append(layers)
        return PinnedChunk(layers, Pinning())

    events = Events()
    host, slower = (HostTier(1 << 20, events, name=name) for name in ("host", "slower"))
    store = ChunkStore([host, slower], events)
    store.keep_resident_as(Residence(pins=pins))
    key, kv = key_of(1), chunk_kv(1, layers=3)
    kept = store.put(key, kv)
    store.flush()
    assert same_kv(kept, kv)
    assert kept.layers[0].key is not kv.layers[0].key
    assert slower.get(key) is kv
    host.delete(key)
    (future,) = store.load([key], Urgency())
    future.result(timeout=PATIENCE)
    wait_until(lambda: host.contains(key))
    found = host.get(key)
    assert found is not None
    assert same_kv(found, kv)
    assert found.layers[0].key is not kv.layers[0].key
    assert made == [3, 3]
    store.close()
