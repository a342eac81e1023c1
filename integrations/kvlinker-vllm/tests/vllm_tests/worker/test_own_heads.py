"""Each of several workers keeps its own heads of a chunk, and no others, in memory."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.store.store_chunks import key_of

from kvlinker.store import ChunkKV, LayerKV
from kvlinker.store.format.sealing import NOT_SEALED
from kvlinker.store.memory import pinned
from kvlinker_vllm.adapter import AttentionLayer
from kvlinker_vllm.adapter.bound_model import BoundModel
from kvlinker_vllm.worker.layers import own_heads
from kvlinker_vllm.worker.worker_chunks import WorkerChunks

LAYERS, TOKENS, DIM = 2, 5, 8


def worker_layers(total, ranks, rank):
    """The layers of one of several workers, as the adapter takes them from vLLM, which gives a
    worker at least one head."""
    module = SimpleNamespace(
        num_kv_heads=max(1, total // ranks), head_size=DIM, kv_sharing_target_layer_name=None
    )
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={f"layer {n}": module for n in range(LAYERS)}
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: total),
    )
    bound: Any = BoundModel.__new__(BoundModel)
    bound._config, bound.rank = config, rank
    names = [f"layer {n}" for n in range(LAYERS)]
    bound._groups = [SimpleNamespace(layer_names=names, kv_cache_group_id=0)]
    bound.max_model_len = 512
    layers: list[AttentionLayer] = list(bound._attention_layers())
    return layers


@pytest.fixture(autouse=True)
def any_module_will_do(monkeypatch):
    monkeypatch.setattr(
        "kvlinker_vllm.adapter.bound_model.unplaceable", lambda module, longest: None
    )


def numbered(heads):
    """A chunk whose numbers are those of their heads."""
    numbers = torch.arange(heads, dtype=torch.float32)[:, None, None].expand(heads, TOKENS, DIM)
    return ChunkKV((LayerKV(numbers.clone(), -numbers),) * LAYERS)


@pytest.mark.parametrize(
    ("total", "ranks", "expected"),
    [
        (8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 4, [[0], [0], [0], [0]]),  # latents, too, have one head, which all workers have
        (3, 1, [[0, 1, 2]]),
    ],
)
@pytest.mark.parametrize("pins", [False, True])
def test_workers_keep_their_heads(tmp_path, monkeypatch, total, ranks, expected, pins):
    whole = numbered(total)
    monkeypatch.setattr(
        "kvlinker_vllm.worker.worker_chunks.pinned",
        lambda kv: pinned.pinned(kv, lambda size: torch.empty(size, dtype=torch.uint8)),
    )
    for rank, heads in enumerate(expected):
        layers = worker_layers(total, ranks, rank)
        chunks = WorkerChunks(
            tmp_path / "chunks", memory_bytes=1 << 20, sealing=NOT_SEALED, pins=pins
        )
        chunks.keep_only(partial(own_heads, layers, torch.float32))
        if rank == 0:
            assert chunks.put(key_of(1), whole)  # the file has all heads
        for kv in (chunks.get(key_of(1)), chunks.resident(key_of(1))):
            assert kv is not None
            assert [kv.layers[1].key[head, 0, 0].item() for head in range(len(heads))] == heads
            assert kv.layers[0].value.shape == (len(heads), TOKENS, DIM)
            assert kv.nbytes == whole.nbytes * len(heads) // total
            assert chunks._index.used_bytes == kv.nbytes
            if len(heads) < total and not pins:
                assert all(
                    layer.key.untyped_storage().nbytes() == layer.key.nbytes for layer in kv.layers
                )


def test_chunks_of_another_model_are_refused():
    layers, dtype = worker_layers(4, 2, 0), torch.float32
    for heads in (2, 3, 8):
        with pytest.raises(ValueError, match="its heads are"):
            own_heads(layers, dtype, numbered(heads))
    with pytest.raises(ValueError, match=r"torch\.float32, the model torch\.float16"):
        own_heads(layers, torch.float16, numbered(4))
    with pytest.raises(ValueError, match="it has 2 layers, the model has 1"):
        own_heads(layers[:1], dtype, numbered(4))
