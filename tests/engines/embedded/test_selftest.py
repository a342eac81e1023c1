import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from kvlinker.base.errors import UnsupportedModelError
from kvlinker.engines.embedded.attention import kernels
from kvlinker.engines.embedded.execution.runner import Runner
from kvlinker.engines.embedded.model import bounds, precision
from kvlinker.engines.embedded.model.bounds import context_window
from kvlinker.engines.embedded.model.discovery import anatomy_of
from kvlinker.engines.embedded.model.interception import attention_of
from kvlinker.engines.embedded.model.obstacles import depends_on_place
from kvlinker.engines.embedded.model.precision import in_fp32
from kvlinker.engines.embedded.model_loading import prepare_model
from kvlinker.engines.embedded.selftest import require_exact, self_test
from tests.toy_models import BASE, FAMILIES, YARN_ROPE, tiny_model


def worst(checks):
    """The largest error; that of rotary tables far from the start is fp32's, and is bounded for
    itself."""
    return max(check.error for check in checks if check.name != "relocate")


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_pass_by_a_wide_margin(family):
    checks = self_test(tiny_model(family))
    assert [check.name for check in checks] == [
        "prefill",
        "recompute",
        "link",
        "relocate",
        "move",
        "far",
    ]
    assert worst(checks) < 5e-6
    assert all(check.passed for check in checks)


@pytest.mark.whole
@pytest.mark.parametrize(
    "family", ["llama", "gemma2-softcap", "gpt_oss-sinks", "deepseek_v3-latents-interleaved"]
)
def test_models_are_linked_exactly_by_the_kernels_for_gpus(family, monkeypatch):
    """Interpreted, and chosen as on a GPU."""
    pytest.importorskip("triton")
    from kvlinker.engines.embedded.attention.triton_attention import TritonAttention

    attended = []
    attend = TritonAttention.attend

    def noted(*args, **options):
        attended.append(args)
        attend(*args, **options)

    monkeypatch.setattr(TritonAttention, "attend", noted)
    monkeypatch.setattr(kernels, "has_kernels", lambda _: True)
    kernels.triton_attention.cache_clear()
    assert worst(self_test(tiny_model(family))) < 5e-6
    kernels.triton_attention.cache_clear()
    assert attended


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bits_is_checked_in_fp32_and_left_as_it_was(family, dtype):
    model = tiny_model(family)
    for weight in model.parameters():  # as files are loaded: tables stay in fp32
        weight.data = weight.data.to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert worst(self_test(model)) < 5e-6
    after = model.state_dict()
    assert all(
        after[name].dtype == tensor.dtype and torch.equal(after[name], tensor)
        for name, tensor in before.items()
    )
    assert not any("forward" in vars(module) for module in model.modules())
    with torch.inference_mode(), attention_of(model, "eager"):
        assert model(torch.arange(3, 9)[None]).logits.dtype == dtype


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss-sinks", "mixtral-moe"])
@pytest.mark.parametrize("kept", [0, 20_000, 1 << 30])
def test_a_model_computes_in_fp32_what_its_copy_in_fp32_would(family, kept, monkeypatch):
    """With room for no weight, some, and all."""
    monkeypatch.setattr(precision, "CHUNK_BYTES", 4000)  # some rows of a linear layer at a time
    monkeypatch.setattr(precision, "KEPT_BYTES", kept)
    model = tiny_model(family).to(torch.bfloat16)
    tokens = torch.arange(3, 60)[None]
    with torch.inference_mode():
        expected = copy.deepcopy(model).float()(tokens).logits
        with in_fp32(model):
            logits = model(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_no_copy_of_the_weights_in_fp32_is_kept(monkeypatch):
    monkeypatch.setattr(precision, "SMALL", 64)  # as many numbers as a norm has
    monkeypatch.setattr(precision, "KEPT_BYTES", 40_000)
    monkeypatch.setattr(precision, "CHUNK_BYTES", 4000)
    model = tiny_model("llama").to(torch.bfloat16)
    whole = 4 * sum(each.numel() for each in model.parameters())
    largest = _LargestInFp32()
    with torch.no_grad(), in_fp32(model), largest:
        held = (each.untyped_storage() for each in model.parameters() if type(each) is nn.Parameter)
        kept = sum(each.nbytes() for each in held)
        model(torch.arange(3, 13)[None])
    assert kept < 40_000 + whole / 4  # the embeddings, as they are, and norms
    assert 0 < largest.numbers <= 1000


class _LargestInFp32(TorchDispatchMode):
    """Finds the most numbers of a tensor in fp32 that something is converted to."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and output.dtype == torch.float32:
            self.numbers = max(self.numbers, output.numel())
        return output


def test_a_module_that_fails_in_fp32_has_its_own_weights_again():
    model = tiny_model("llama").to(torch.bfloat16)
    norm = model.model.norm
    with in_fp32(model), pytest.raises(RuntimeError):
        norm(torch.zeros(1, 2, 63))
    assert norm.weight.dtype == torch.bfloat16


SCALED = YARN_ROPE | {"llama_4_scaling_beta": 0.1}
"""Queries beyond position 512 are scaled."""


def random_model(kind, **changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(BASE | changes))).eval()


def test_queries_that_are_scaled_by_position_bound_the_context():
    model = random_model("ministral3", rope_parameters=SCALED, sliding_window=None)
    require_exact(model)
    assert context_window(model) == 512


def test_a_context_window_that_is_not_known_is_asked_for(monkeypatch):
    model = random_model("llama")
    monkeypatch.delattr(type(model.config), "max_position_embeddings")
    monkeypatch.delitem(vars(model.config), "max_position_embeddings")
    with pytest.raises(UnsupportedModelError, match="does not say max_position_embeddings"):
        require_exact(model)


def test_what_depends_on_far_positions_is_refused(monkeypatch):
    """As with a model that scales its queries by a parameter of another name."""
    monkeypatch.setattr(bounds, "QUERY_SCALING", "unknown")
    model = random_model("ministral3", rope_parameters=SCALED, sliding_window=None)
    checks = self_test(model)
    assert [check.name for check in checks if not check.passed] == ["far"]
    assert checks[-1].error > 1e-2
    with pytest.raises(UnsupportedModelError, match=r"at later positions.*1,952 positions"):
        require_exact(model)


def test_a_model_that_knows_places_otherwise_is_refused():
    """A chunk's KV is then right where it was computed, and wrong where it is linked."""
    model = random_model("llama")

    def add_positions(layer, args, kwargs):
        return (args[0] + 0.01 * kwargs["position_ids"][..., None], *args[1:]), kwargs

    model.model.layers[1].register_forward_pre_hook(add_positions, with_kwargs=True)
    checks = self_test(model)
    assert [check.passed for check in checks] == [True, True, True, True, False]
    with pytest.raises(
        UnsupportedModelError, match=r"the same text at later positions.*The check move"
    ):
        require_exact(model)


def test_large_attention_scores_are_linked_as_the_model_computes_them():
    """With an attention scale of 1, as Granite's configuration has it by default, rounding of
    angles far from the start changes the model's own answers; linking adds nothing to it."""
    model = random_model("granite", attention_multiplier=1.0)
    assert worst(self_test(model)) < 2e-5


def test_layers_that_keep_a_state_are_seen_however_little_it_does():
    """A state beside those of a known kind that adds nothing: no figure could tell."""
    model = tiny_model("qwen3_5-states")
    forward = model.forward

    def hiding(*args, **kwargs):
        output = forward(*args, **kwargs)
        if output.past_key_values is not None:
            output.past_key_values.hidden_state = torch.zeros(1, 8)
        return output

    model.forward = hiding
    with pytest.raises(UnsupportedModelError, match="keep a state"):
        require_exact(model)


def test_an_error_of_pythons_is_not_the_reason(monkeypatch):
    def failing(runner, batch):
        raise TypeError("'NoneType' object is not subscriptable")

    model = random_model("llama")
    monkeypatch.setattr(Runner, "step", failing)
    with pytest.raises(
        UnsupportedModelError, match="attention is computed in a form of its own"
    ) as caught:
        require_exact(model)
    assert "NoneType" not in caught.value.message
    assert isinstance(caught.value.__cause__, TypeError)


def test_memory_that_is_exhausted_is_no_kind_of_model(monkeypatch):
    def exhausted(runner, batch):
        raise MemoryError

    monkeypatch.setattr(Runner, "step", exhausted)
    with pytest.raises(MemoryError):
        require_exact(random_model("llama"))


@pytest.mark.parametrize("kind", ["gpt2", "opt", "bloom", "deepseek_v3"])
def test_models_that_cannot_be_linked_are_refused_clearly(kind):
    config = AutoConfig.for_model(kind, **BASE)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError) as caught:
        prepare_model(model, None)
    assert type(model).__name__ in caught.value.message


def test_a_norm_behind_the_rotary_embedding_is_found_out():
    """Weighed behind the rotation, products of queries and keys depend on more than distances."""
    config = AutoConfig.for_model("hunyuan_v1_dense", **BASE, head_dim=16)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += 0.3 * torch.randn_like(weight)
    with pytest.raises(UnsupportedModelError, match=r"at later positions\. The check prefill"):
        require_exact(model)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", {"max_position_embeddings": 110}),
        ("mamba", {}),
    ],  # positions end before, or are none
)
def test_where_a_model_takes_no_such_positions_nothing_is_found(kind, options):
    config = AutoConfig.for_model(kind, **BASE | options)
    torch.manual_seed(0)
    assert not depends_on_place(AutoModelForCausalLM.from_config(config).eval())


def test_layers_tell_their_shapes_and_rotary_kinds():
    layers = anatomy_of(tiny_model("gemma3")).layers
    assert len(layers) == 7
    assert {(layer.query_heads, layer.kv_heads, layer.key_dim) for layer in layers} == {(4, 2, 16)}
    assert len({id(layer.rotary) for layer in layers}) == 2
    assert layers[5].rotary is not layers[0].rotary
    no_rotary = [
        layer.rotary is None for layer in anatomy_of(tiny_model("cohere2-interleaved-nope")).layers
    ]
    assert no_rotary == [False, False, False, True, False]


def test_other_models_in_the_process_keep_working():
    tokens = torch.arange(3, 60)[None]
    model = tiny_model("llama")
    with torch.inference_mode():
        before = model(tokens).logits
        prepare_model(tiny_model("llama"), None)
        after = model(tokens).logits
    assert torch.equal(before, after)
