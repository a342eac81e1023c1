import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvlinker.embedded.model import precision
from kvlinker.embedded.model.anatomy import trace_layers
from kvlinker.embedded.model.interception import attention_of
from kvlinker.embedded.model.precision import in_fp32
from kvlinker.embedded.model_loading import prepare_model
from kvlinker.embedded.selftest import require_exact, self_test
from kvlinker.errors import UnsupportedModelError
from tests.toy_models import BASE, FAMILIES, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_pass_by_a_wide_margin(family):
    checks = self_test(tiny_model(family))
    assert [check.name for check in checks] == ["prefill", "recompute", "link", "relocate"]
    assert max(check.error for check in checks) < 5e-6


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bits_is_checked_in_fp32_and_left_as_it_was(family, dtype):
    model = tiny_model(family).to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert max(check.error for check in self_test(model)) < 5e-6
    after = model.state_dict()
    assert all(after[name].dtype == dtype and torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not any("forward" in vars(module) for module in model.modules())
    with torch.inference_mode(), attention_of(model, "eager"):
        assert model(torch.arange(3, 9)[None]).logits.dtype == dtype


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss-sinks", "mixtral-moe"])
def test_a_model_computes_in_fp32_what_its_copy_in_fp32_would(family, monkeypatch):
    monkeypatch.setattr(precision, "CHUNK_BYTES", 4000)  # some rows of a linear layer at a time
    model = tiny_model(family).to(torch.bfloat16)
    tokens = torch.arange(3, 60)[None]
    with torch.inference_mode():
        expected = copy.deepcopy(model).float()(tokens).logits
        with in_fp32(model):
            logits = model(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_module_that_fails_in_fp32_has_its_own_weights_again():
    model = tiny_model("llama").to(torch.bfloat16)
    norm = model.model.norm
    with in_fp32(model), pytest.raises(RuntimeError):
        norm(torch.zeros(1, 2, 63))
    assert norm.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["gpt2", "opt", "bloom", "mamba", "gptj", "falcon", "deepseek_v3"])
def test_models_that_cannot_be_linked_are_refused_clearly(kind):
    config = AutoConfig.for_model(kind, **BASE)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError) as caught:
        prepare_model(model, None)
    assert type(model).__name__ in caught.value.message


def test_a_norm_behind_the_rotary_embedding_is_found_out():
    """Normalised after rotation, keys cannot be stored without it: only the figures tell."""
    config = AutoConfig.for_model("hunyuan_v1_dense", **BASE, head_dim=16)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += 0.3 * torch.randn_like(weight)
    with pytest.raises(UnsupportedModelError, match="prefill"):
        require_exact(model)


def test_layers_tell_their_shapes_and_rotary_kinds():
    layers = trace_layers(tiny_model("gemma3"))
    assert len(layers) == 7
    assert {(layer.query_heads, layer.kv_heads, layer.key_dim) for layer in layers} == {(4, 2, 16)}
    assert len({id(layer.rotary) for layer in layers}) == 2
    assert layers[5].rotary is not layers[0].rotary
    no_rotary = [layer.rotary is None for layer in trace_layers(tiny_model("cohere2-interleaved-nope"))]
    assert no_rotary == [False, False, False, True, False]


def test_other_models_in_the_process_keep_working():
    tokens = torch.arange(3, 60)[None]
    model = tiny_model("llama")
    with torch.inference_mode():
        before = model(tokens).logits
        prepare_model(tiny_model("llama"), None)
        after = model(tokens).logits
    assert torch.equal(before, after)
