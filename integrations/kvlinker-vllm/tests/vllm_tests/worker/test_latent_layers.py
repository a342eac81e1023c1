"""Latents are asked and placed as attention over what they expand to has it, whole on every
worker."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from kvlinker.engines.native.placing import native_placing
from kvlinker.store import ChunkKV, LayerKV
from kvlinker_vllm.adapter import CacheGroup, rotate
from kvlinker_vllm.adapter.latent_layers import LatentLayer, latents_unplaceable
from kvlinker_vllm.worker import fused_placing
from kvlinker_vllm.worker.layers import (
    ChunkPart,
    layer_launches,
    own_heads,
    place,
    query_operands,
)

HEADS, OWN, SHARED, LATENT = 4, 8, 16, 24
TOKENS, BLOCKS, BLOCK_SIZE = 40, 6, 16
ROPE: dict[str, Any] = {
    "rope_type": "deepseek_yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}


class Backend:
    """Writes a latent, and behind it the key, as vLLM's backends do."""

    def do_kv_cache_update(self, latent, key, cache, slots, kind, scale):
        cache.view(-1, LATENT + SHARED)[slots] = torch.cat([latent, key.squeeze(1)], dim=-1)


def latent_layer():
    """One layer of one worker, with vLLM's rotary embedding."""
    module = SimpleNamespace(
        impl=Backend(),
        kv_cache=torch.zeros(BLOCKS, BLOCK_SIZE, LATENT + SHARED),
        kv_cache_dtype="auto",
        num_heads=HEADS,
        qk_nope_head_dim=OWN,
        qk_rope_head_dim=SHARED,
        kv_lora_rank=LATENT,
        W_UK_T=torch.randn(HEADS, OWN, LATENT),
        _k_scale=torch.tensor(1.0),
    )
    with set_current_vllm_config(VllmConfig()):
        rotary = get_rope(SHARED, 64, is_neox_style=False, rope_parameters=ROPE)
    stand_in: Any = module
    return replace(LatentLayer.of("layer", stand_in, 0), rotary=rotary)


@pytest.fixture
def part():
    kv = ChunkKV((LayerKV(torch.randn(1, TOKENS, SHARED), torch.randn(1, TOKENS, LATENT)),))
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[: TOKENS - 3]
    return ChunkPart(kv, 3, TOKENS, 20, torch.arange(3, TOKENS) + 17, slots)


def test_projected_queries_ask_what_expanded_keys_are_asked():
    layer = latent_layer()
    query = torch.randn(5, HEADS, OWN + SHARED)
    key, latent = torch.randn(7, 1, SHARED), torch.randn(7, 1, LATENT)
    expanded = torch.einsum("tl,hpl->thp", latent[:, 0], layer.module.W_UK_T)
    keys = torch.cat([expanded, key.expand(-1, HEADS, -1)], dim=-1)
    expected = torch.einsum("qhd,thd->qht", query, keys)
    asked = layer.query_operand(key, latent)[:, 0]
    ours = torch.einsum("qhd,td->qht", layer.queries(query.flatten(1)), asked)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_every_worker_writes_all_of_a_chunk(part):
    (layer,) = part.kv.layers
    for _ in range(2):
        worker = latent_layer()
        own = own_heads([worker], torch.float32, part.kv)
        assert own.layers == part.kv.layers
        place([worker], [[part]])
        found = worker.module.kv_cache.view(-1, LATENT + SHARED)[part.slots]
        torch.testing.assert_close(found[:, :LATENT], layer.value[0, 3:])
        turned = rotate(worker.rotary, part.positions, layer.key[0, 3:, None].clone())[:, 0]
        torch.testing.assert_close(found[:, LATENT:], turned)
        assert (turned - layer.key[0, 3:]).abs().max() > 0.1
        asked = query_operands(worker, 0, [part])[:, 0]
        torch.testing.assert_close(asked, torch.cat([found[:, LATENT:], layer.value[0, 3:]], -1))


def test_a_turned_key_is_the_models_own(part):
    """Neighbours turn together, by angles of YaRN, with its factor on length."""
    worker = latent_layer()
    key = part.kv.layers[0].key[0, 3:, None]
    cos, sin = worker.rotary.cos_sin_cache[part.positions].chunk(2, dim=-1)
    first, second = key[:, 0, ::2], key[:, 0, 1::2]
    expected = torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(1)
    turned = rotate(worker.rotary, part.positions, key.clone())[:, 0]
    torch.testing.assert_close(turned, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("on_gpu", [True, False])
def test_one_kernel_places_latents_as_layer_by_layer(part, on_gpu, monkeypatch, request):
    if on_gpu:
        request.getfixturevalue("interpreted")
    elif native_placing() is None:
        pytest.skip("no native code for this CPU")
    monkeypatch.setattr(fused_placing, "has_kernels", lambda _: on_gpu)
    worker = latent_layer()
    bound: Any = SimpleNamespace(
        device=torch.device("cpu"),
        dtype=torch.float32,
        has_rounded_cache=False,
        max_model_len=256,
        to_device=lambda values: values,
        groups=[CacheGroup(BLOCK_SIZE)],
    )
    placing = fused_placing.fused_placing(bound, [worker])
    assert placing is not None
    cache = worker.module.kv_cache
    found = []
    for launches in (layer_launches([worker], [[part]]), placing.launches([[part]])):
        cache.fill_(7)
        for _, work in launches:
            work()
        found.append(cache.clone())
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


def test_latents_that_cannot_be_placed_say_why():
    plain = {"use_sparse": False, "impl": Backend(), "W_UK_T": torch.zeros(1)}
    assert latents_unplaceable(SimpleNamespace(**plain)) is None
    for change, told in (({"use_sparse": True}, "indexer"), ({"W_UK_T": None}, "Backend packs")):
        assert told in (latents_unplaceable(SimpleNamespace(**(plain | change))) or "")
