"""What is remembered of where a chunk lies is that chunk's alone."""

import numpy as np
import torch

from kvlinker.engines.embedded.execution.batch import SegmentTable
from kvlinker.engines.embedded.kv_cache.pool import KVPool, SlotSpan
from kvlinker.store.chunk_kv import ChunkKV, LayerKV
from tests.toy_models import loaded_model

TOKENS = 5


def made(layers):
    """A chunk with tensors of its own."""
    kept = [(each.kv_heads, TOKENS, each.key_dim) for each in layers]
    return ChunkKV(tuple(LayerKV(*torch.zeros(2, *size).bfloat16()) for size in kept))


def addresses(table):
    """Where keys and values of the segments begin: [layers, segments, 2]."""
    return table[:, :, [0, table.shape[2] // 2]]


def test_chunks_that_share_a_layer_are_told_apart():
    layers = loaded_model("llama").layers
    pool = KVPool(layers, 64, dtype=torch.bfloat16, device=torch.device("cpu"))
    table = SegmentTable(pool)
    one = made(layers)
    other, addresses_seen = None, []
    for _ in range(20):
        own = made(layers).layers[1:]
        del other  # the next chunk is likely to lie where this one did
        other = ChunkKV((one.layers[0], *own))
        addresses_seen.append(id(other))
        found = addresses(table.of([one, other], [SlotSpan(0, 64)]))
        for index, layer in enumerate(other.layers):
            assert list(found[index, 1]) == [layer.key.data_ptr(), layer.value.data_ptr()]
    assert len(set(addresses_seen)) < len(addresses_seen)


def test_a_table_is_the_same_from_memory():
    layers = loaded_model("llama").layers
    pool = KVPool(layers, 64, dtype=torch.bfloat16, device=torch.device("cpu"))
    table, chunk = SegmentTable(pool), made(layers)
    first = table.of([chunk], [SlotSpan(3, 7), SlotSpan(20, 1)])
    assert np.array_equal(first, table.of([chunk], [SlotSpan(3, 7), SlotSpan(20, 1)]))
    assert list(first[0, :, 2]) == [TOKENS, 7, 1]
