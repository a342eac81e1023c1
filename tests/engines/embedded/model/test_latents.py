"""Attention over latents in place is attention over the keys and values that they expand to."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from kvlinker.base.errors import UnsupportedModelError
from kvlinker.engines.contract.cost import CostModel, kv_bytes_per_token
from kvlinker.engines.embedded.kv_cache.pool import KVPool
from kvlinker.engines.embedded.model.anatomy import LayerShape
from kvlinker.engines.embedded.model.discovery import anatomy_of
from kvlinker.engines.embedded.model.latents import Latents
from kvlinker.engines.embedded.model_loading import prepare_model
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker.store.chunk_kv import LayerKV
from kvlinker_lab.models.small_models import LATENT, SMALL, small_model
from tests.toy_models import tiny_model

V3 = "deepseek_v3-latents-interleaved"


def of_size(heads, key, shared, value, latent, device=None):
    projection = nn.Linear(latent, heads * (key + value), bias=False, device=device)
    return Latents(projection, heads, key, shared)


def test_latents_take_what_deepseek_v3s_own_shape_says():
    latents = of_size(128, key=128, shared=64, value=128, latent=512, device="meta")
    layers = [LayerShape(128, 1, 64, 512, None, latents)] * 61
    assert kv_bytes_per_token(layers, torch.bfloat16) == 70_272
    assert sum(layer.expanded_values_per_token for layer in layers) * 2 == 4_997_120
    assert CostModel(61, layers).per_pair == 61 * 2 * 128 * (64 + 512 + 512)


@torch.inference_mode()
def test_attention_over_latents_is_that_of_the_models_own_expansion():
    attention = tiny_model(V3).model.layers[0].self_attn
    query = torch.randn(4, 5, 24)
    latent, shared = torch.randn(1, 1, 9, 32), torch.randn(1, 1, 9, 8)
    keys, values = attention.expand_kv(latent, shared)
    expected = (query @ keys[0].mT).softmax(-1) @ values[0]
    found = Latents.of(attention, query[None], shared)
    assert found.value_dim == values.shape[-1]
    joined = torch.cat([shared, latent], -1)[0]
    attended = (found.absorbed(query) @ joined.mT).softmax(-1) @ joined
    torch.testing.assert_close(found.expanded(attended.transpose(0, 1)), expected.transpose(0, 1))


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v2", "longcat_flash"])
def test_models_keep_their_latents_and_no_copy_of_a_weight(kind):
    model = small_model(kind)
    for layer in anatomy_of(model).layers:
        assert (layer.kv_heads, layer.key_dim, layer.value_dim) == (1, 8, 16)
        assert layer.rotary is not None
        assert layer.latents is not None
        assert any(layer.latents.projection is part for part in model.modules())


def test_a_projection_of_another_form_is_refused():
    model = small_model("deepseek_v3")
    for layer in model.model.layers:
        old = layer.self_attn.kv_b_proj
        layer.self_attn.kv_b_proj = nn.Linear(old.in_features, old.out_features)
    with pytest.raises(UnsupportedModelError, match="in a form of its own"):
        anatomy_of(model)


def test_mistral_4_is_linked_up_to_where_its_queries_are_scaled():
    """No class of it is registered for language modelling alone."""
    from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

    usual = AutoConfig.for_model("mistral4").to_dict()
    sizes = {name: value for name, value in SMALL.items() if name in usual} | LATENT
    bounds = {"original_max_position_embeddings": 512, "partial_rotary_factor": 1.0}
    rope = usual["rope_parameters"] | bounds
    config = AutoConfig.for_model("mistral4", **sizes | {"rope_parameters": rope})
    torch.manual_seed(0)
    model = Mistral4ForCausalLM._from_config(config, attn_implementation="eager").float().eval()
    assert prepare_model(model, byte_tokenizer()).context_window == 512


def test_keys_and_latents_lie_side_by_side():
    layers = anatomy_of(tiny_model(V3)).layers
    pool = KVPool(layers, 7, dtype=torch.float32, device=torch.device("cpu"))
    key, value = pool.keys[0][:, 2:5], pool.values[0][:, 2:5]
    layer = LayerKV(key, value)
    key.fill_(1)
    value.fill_(2)
    assert layer.is_joined
    assert layer.joined.data_ptr() == key.data_ptr()
    assert layer.joined[0].tolist() == [[1.0] * 8 + [2.0] * 32] * 3
    moved = layer.to(torch.device("meta"))
    assert moved.is_joined
    assert (moved.key.shape, moved.value.shape) == (key.shape, value.shape)


def test_what_lies_apart_is_joined_by_copying():
    whole = torch.arange(24.0).view(1, 2, 12)
    for key, value in (
        (whole[..., :4].clone(), whole[..., 4:].clone()),
        (whole[..., :4], whole[..., 5:]),
        (whole[..., 4:], whole[..., :4]),
    ):
        layer = LayerKV(key, value)
        assert not layer.is_joined
        assert torch.equal(layer.joined, torch.cat([key, value], -1))
