import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvlinker.embedded.model import selftest
from kvlinker.embedded.model.anatomy import trace_layers
from kvlinker.embedded.model.loading import prepare_model
from kvlinker.embedded.model.selftest import require_exact, self_test
from kvlinker.errors import UnsupportedModelError
from tests.toy_models import BASE, FAMILIES, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_pass_by_a_wide_margin(family):
    checks = self_test(tiny_model(family))
    assert [check.name for check in checks] == ["prefill", "recompute", "link", "relocate"]
    assert max(check.error for check in checks) < 5e-6


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_bf16_model_is_checked_in_fp32_and_left_as_it_was(family):
    model = tiny_model(family).to(torch.bfloat16)
    assert max(check.error for check in self_test(model)) < 5e-6
    assert next(model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize(("on_device", "on_host", "device"), [(9, 0, "meta"), (0, 9, "cpu"), (0, 0, None)])
def test_the_copy_in_fp32_lies_where_there_is_memory_for_it(monkeypatch, on_device, on_host, device):
    """A model on the meta device stands for one on an accelerator."""
    model = tiny_model("llama").to(torch.bfloat16)
    size = 4 * sum(weight.numel() for weight in model.parameters())
    free = {"meta": on_device * size, "cpu": on_host * size}
    monkeypatch.setattr(selftest, "_free_bytes", lambda place: free[place.type])
    there = model.to("meta")
    copies = []
    monkeypatch.setattr(selftest, "_copy_in_fp32", lambda model, place: copies.append(place.type))
    precise = selftest._precise(there)
    assert copies == ([] if device is None else [device])
    assert (precise is there) == (device is None)


def test_a_copy_in_fp32_shares_nothing_and_keeps_what_is_tied():
    model = tiny_model("llama").to(torch.bfloat16)
    model.lm_head.weight = model.model.embed_tokens.weight
    copied = selftest._copy_in_fp32(model, torch.device("cpu"))
    assert {weight.dtype for weight in copied.parameters()} == {torch.float32}
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    kept = {weight.data_ptr() for weight in (*model.parameters(), *model.buffers())}
    assert kept.isdisjoint(weight.data_ptr() for weight in (*copied.parameters(), *copied.buffers()))


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
