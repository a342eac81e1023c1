"""Passes of models become programs, or there is a reason why not."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from kvlinker.engines.embedded.attention.kernels import native_attention
from kvlinker.engines.embedded.execution import compiling
from kvlinker.engines.embedded.execution.compiling import LARGEST_ERROR, compile_step, program_error
from kvlinker.engines.embedded.model.recording.lowering import record_program
from kvlinker.engines.embedded.model.recording.program import Product, RecordedAttention
from kvlinker.engines.embedded.model.recording.trace import UnrecordableError
from kvlinker.engines.embedded.model_loading import prepare_model
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from tests.toy_models import HYBRIDS, tiny_model

pytestmark = [
    pytest.mark.skipif(native_attention() is None, reason="no native attention"),
    pytest.mark.usefixtures("without_amx"),
]

RECORDED = [
    "llama",
    "longrope",
    "qwen3",
    "mistral-window",
    "gemma2-softcap",
    "gemma3",
    "phi3",
    "gpt_neox-partial",
    "cohere2-interleaved-nope",
    "olmo2",
    "phi-partial",
    "smollm3",
    "starcoder2",
    "gemma4-shared-two-sizes",
    "deepseek_v2-latents-interleaved",
    "minicpm3-latents",
    *HYBRIDS,
]


def loaded(family, weights="auto", **changes):
    return prepare_model(
        tiny_model(family, **changes).bfloat16(), byte_tokenizer(), weights=weights
    )


@pytest.mark.parametrize("family", RECORDED)
def test_programs_compute_what_the_modules_do(family):
    model = loaded(family)
    assert not isinstance(model.program, str), model.program
    assert program_error(model.model, model.anatomy, model.program) <= LARGEST_ERROR
    assert model.computes_steps == "compiled"


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_in_fewer_bits_are_multiplied_as_the_modules_do(weights):
    model = loaded("phi3", weights)
    assert not isinstance(model.program, str), model.program
    assert program_error(model.model, model.anatomy, model.program) <= LARGEST_ERROR


def test_plain_weights_are_multiplied_as_they_lie():
    model = loaded("llama", intermediate_size=24)  # too few outputs to be packed
    assert not isinstance(model.program, str), model.program
    products = [each for each in model.program.operations if isinstance(each, Product)]
    plain = sum(each.weights.form == "plain" for each in products)
    assert 2 * 3 <= plain < len(products)
    assert program_error(model.model, model.anatomy, model.program) <= LARGEST_ERROR


def test_buffers_are_used_again():
    program = loaded("llama").program
    assert not isinstance(program, str)
    assert len(program.buffers) < len(program.operations) / 4
    layers = [each.layer for each in program.operations if isinstance(each, RecordedAttention)]
    assert layers == [0, 1, 2]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama4-interleaved-nope", "no native code computes"),
        ("deepseek_v32-picks", "indexers pick"),
        ("longcat-latents-interleaved", "depends on numbers"),
        ("diffllama-two-attentions", "no native code computes aten.repeat"),
    ],
)
def test_what_is_not_known_is_left_to_the_modules(family, reason, caplog):
    with caplog.at_level("INFO", "kvlinker.engines.embedded.execution.compiling"):
        model = loaded(family)
    assert isinstance(model.program, str)
    assert reason in model.program
    assert model.computes_steps.endswith(model.program)
    assert f"Steps are computed by the model's modules: {model.program}." in caplog.messages


def test_models_in_fp32_and_without_native_code_are_computed_by_their_modules():
    exact = prepare_model(tiny_model("llama"), byte_tokenizer())
    assert exact.program == "native code attends in bf16, and it is in float32"
    without = prepare_model(tiny_model("llama").bfloat16(), byte_tokenizer(), native=False)
    assert without.program == "native is off"


def test_a_program_that_computes_something_else_is_not_used(monkeypatch):
    model = loaded("llama")
    other = loaded("llama", rms_norm_eps=0.5).program
    monkeypatch.setattr(compiling, "record_program", lambda *_: other)
    reason = compile_step(model.model, model.anatomy)
    assert isinstance(reason, str)
    assert reason.startswith("what was recorded computes something else")


class Odd(nn.Module):
    """Does something to the hidden states before a layer's own norm."""

    def __init__(self, norm, odd):
        super().__init__()
        self.norm, self.odd = norm, odd

    def forward(self, hidden):
        return self.norm(self.odd(hidden))


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (lambda hidden: hidden.cumsum(1), "no native code computes aten.cumsum"),
        (lambda hidden: hidden + hidden.flip(1), "no native code computes aten.flip"),
        (lambda hidden: hidden + hidden[:, :1], "tokens are mixed"),
        (lambda hidden: hidden * (1 if hidden.sum() > 0 else 2), "depends on numbers"),
        (lambda hidden: hidden * hidden.shape[1], "depend on the tokens' number"),
        (lambda hidden: hidden.double().bfloat16(), "float64"),
    ],
)
def test_what_a_list_of_operations_cannot_be_is_refused(odd, reason):
    model = loaded("llama")
    layer = model.model.model.layers[1]
    layer.input_layernorm = Odd(layer.input_layernorm, odd)
    with pytest.raises(UnrecordableError, match=reason):
        record_program(model.model, model.anatomy)


@torch.inference_mode()
def test_operations_in_place_are_recorded():
    model = loaded("llama")
    layer = model.model.model.layers[1]
    layer.input_layernorm = Odd(layer.input_layernorm, lambda hidden: (hidden + 1).mul_(0.5))
    program = record_program(model.model, model.anatomy)
    assert program_error(model.model, model.anatomy, program) <= LARGEST_ERROR


def test_a_head_that_answers_with_tokens_that_cannot_be_embedded_is_refused():
    model = tiny_model("llama").bfloat16()
    table = model.get_input_embeddings()
    wide = loaded("llama")
    wide.model.set_input_embeddings(nn.Embedding.from_pretrained(table.weight[:-1].detach()))
    with pytest.raises(UnrecordableError, match="differ in the tokens they know"):
        record_program(wide.model, wide.anatomy)


class WithGates(nn.Module):
    """Returns a second result beside a layer's own."""

    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden_states, **kwargs):
        return self.mixer(hidden_states, **kwargs), hidden_states.sigmoid()


class Gated(nn.Module):
    """Uses a second result, or leaves it."""

    def __init__(self, mixer, *, uses):
        super().__init__()
        self.mixer, self.uses = WithGates(mixer), uses

    def forward(self, **kwargs):
        output, gates = self.mixer(**kwargs)
        return output * gates if self.uses else output


@pytest.mark.parametrize("uses", [False, True])
def test_a_second_result_of_a_module_is_never_that_of_the_recorded_pass(uses):
    model = loaded("qwen3_5-states")
    layer = model.model.model.layers[0]
    layer.linear_attn = Gated(layer.linear_attn, uses=uses)
    called = model.anatomy.called | {layer.linear_attn.mixer}
    anatomy = replace(model.anatomy, called=called)
    if uses:
        with pytest.raises(UnrecordableError, match="a second result of a module"):
            record_program(model.model, anatomy)
    else:
        program = record_program(model.model, anatomy)
        assert program_error(model.model, anatomy, program) <= LARGEST_ERROR
