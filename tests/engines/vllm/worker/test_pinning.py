"""Chunks in pinned memory are whole, and take little more than their size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from kvlinker.engines.vllm.worker.pinning import ALIGNMENT, pinned
from kvlinker.store import ChunkKV, LayerKV


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
