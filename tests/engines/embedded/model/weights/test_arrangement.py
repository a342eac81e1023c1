"""Packed and shared weights compute what plain ones do, and take hardly more memory than they."""

from __future__ import annotations

import copy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from kvlinker.base.errors import ModelLoadError
from kvlinker.engines.contract.cost import CostModel, count_weights
from kvlinker.engines.contract.model_files import expert_counts, fingerprint
from kvlinker.engines.embedded.model.decoder import decoder_layers
from kvlinker.engines.embedded.model.discovery import anatomy_of
from kvlinker.engines.embedded.model.interception import attention_of
from kvlinker.engines.embedded.model.weights import arrangement, quantized
from kvlinker.engines.embedded.model.weights.arrangement import arrange_weights, watch_linears
from kvlinker.engines.embedded.model.weights.linears import MatrixLinear, SharedLinear, SharedMatrix
from kvlinker.engines.embedded.model.weights.matrices import BlockedMatrix, PackedMatrix, packs
from kvlinker.engines.embedded.model.weights.native_products import native_products
from kvlinker.engines.embedded.model.weights.native_quantized import CodesMatrix
from kvlinker.engines.embedded.model.weights.quantized import Int4Matrix, Int8Matrix
from kvlinker.engines.embedded.model.weights.tied_embedding import TiedEmbedding
from kvlinker.engines.embedded.model_loading import prepare_model
from kvlinker.settings import WeightFormat
from tests.toy_models import FAMILIES, tiny_model

CPU = torch.device("cpu")

needs_packing = pytest.mark.skipif(
    not packs(torch.bfloat16, CPU), reason="the CPU has no packed bf16 weights"
)


@pytest.fixture(autouse=True)
def spare_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave room to pack every layer of models as small as the tests'."""
    monkeypatch.setattr(arrangement, "SPARE_SHARE", 1.0)


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let oneDNN multiply few rows, too: bit by bit as by plain weights."""
    monkeypatch.setattr(PackedMatrix, "NATIVE_UP_TO", 0)
    monkeypatch.setattr(BlockedMatrix, "takes", lambda weight, native: False)


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch's kernels multiply by quantised weights, as on processors without native code."""
    monkeypatch.setattr(arrangement, "native_products", lambda: None)


def pack(model: Any, form: WeightFormat = "auto") -> None:
    with watch_linears(model) as seen:
        anatomy_of(model)
    arrange_weights(model, seen, form)


def logits(model: Any, tokens: int, **options: Any) -> torch.Tensor:
    ids = torch.randint(3, 256, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    with torch.inference_mode(), attention_of(model, "eager"):
        return model(ids, use_cache=False, **options).logits


@needs_packing
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("onednn")
def test_packed_weights_are_bit_identical_in_bf16(family: str) -> None:
    model = tiny_model(family).to(torch.bfloat16)
    packed = copy.deepcopy(model)
    pack(packed)
    assert any(isinstance(module, SharedLinear | MatrixLinear) for module in packed.modules())
    for tokens in (1, 2, 7, 33, 150):
        assert torch.equal(logits(packed, tokens), logits(model, tokens))


@needs_packing
@pytest.mark.parametrize("family", FAMILIES)
def test_few_rows_by_native_code_are_as_exact(family: str) -> None:
    if native_products() is None:
        pytest.skip("no native products")
    exact = tiny_model(family)
    plain = copy.deepcopy(exact).to(torch.bfloat16)
    packed = copy.deepcopy(plain)
    pack(packed)
    for tokens in (1, 7, 33):
        expected = logits(exact, tokens)
        assert (
            relative(logits(packed, tokens), expected)
            < 1.2 * relative(logits(plain, tokens), expected) + 1e-3
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_are_as_exact_in_fp32(family: str) -> None:
    model = tiny_model(family)
    packed = copy.deepcopy(model)
    pack(packed)
    for tokens in (1, 2, 33):
        torch.testing.assert_close(
            logits(packed, tokens), logits(model, tokens), rtol=1e-4, atol=1e-4
        )


def linears(model: nn.Module, layer: int = 0) -> dict[str, list[str]]:
    """The names of a decoder layer's linear layers, by the kind that they are."""
    kinds: dict[str, list[str]] = {}
    for name, module in decoder_layers(model)[layer].named_modules():
        if isinstance(module, nn.Linear):
            kinds.setdefault(type(module).__name__, []).append(name.split(".")[-1])
    return kinds


@needs_packing
def test_layers_that_take_the_same_input_share_a_matrix() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    pack(model)
    assert linears(model) == {
        "SharedLinear": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
        "MatrixLinear": ["o_proj", "down_proj"],
    }
    layer = model.model.layers[0]
    assert layer.self_attn.q_proj.shared is layer.self_attn.v_proj.shared
    assert layer.self_attn.q_proj.shared is not layer.mlp.gate_proj.shared
    assert isinstance(model.lm_head, MatrixLinear)


@needs_packing
def test_a_model_is_counted_saved_and_named_as_before(tmp_path: Path) -> None:
    model = tiny_model("qwen3", attention_bias=True).to(torch.bfloat16)
    layers = anatomy_of(model).layers
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    name, cost = fingerprint(model), CostModel(count_weights(model), layers).per_token
    pack(model)
    assert fingerprint(model) == name
    assert CostModel(count_weights(model), layers).per_token == cost
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    assert again.keys() == before.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in before.items())


@needs_packing
@pytest.mark.skipif(native_products() is None, reason="no native products")
def test_tied_embeddings_are_rows_of_the_packed_head(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True).to(torch.bfloat16)
    weight = model.model.embed_tokens.weight.detach().clone()
    pack(model)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, TiedEmbedding)
    assert embedding.matrix is model.lm_head.matrix
    plain = (each for each in model.parameters() if each.layout == torch.strided)
    assert not any(each.shape == weight.shape for each in plain)
    every = torch.arange(len(weight))
    assert torch.equal(embedding(every), weight)
    assert torch.equal(embedding(every[None, -3:]), weight[None, -3:])
    assert torch.equal(embedding.weight, weight)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(again.model.embed_tokens.weight, weight)
    assert again.lm_head.weight is again.model.embed_tokens.weight


@needs_packing
@pytest.mark.usefixtures("onednn")
def test_tied_embeddings_keep_their_plain_weight_where_it_is_in_no_blocks() -> None:
    model = tiny_model("llama", tie_word_embeddings=True).to(torch.bfloat16)
    embedding = model.model.embed_tokens.weight
    pack(model)
    assert model.model.embed_tokens.weight is embedding
    assert torch.equal(model.lm_head.weight, embedding)


@needs_packing
def test_what_would_take_too_much_memory_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", tie_word_embeddings=True).to(torch.bfloat16)
    size = sum(weight.nbytes for weight in model.parameters())
    monkeypatch.setattr(arrangement, "SPARE_SHARE", 0.9 * model.lm_head.weight.nbytes / size)
    pack(model)
    assert type(model.lm_head) is nn.Linear
    assert "SharedLinear" in linears(model)


@needs_packing
def test_routers_stay_plain() -> None:
    model = nn.Sequential(nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)).bfloat16()
    with watch_linears(model) as seen, torch.inference_mode():
        model(torch.ones(2, 64, dtype=torch.bfloat16))
    arrange_weights(model, seen)
    assert [type(layer) for layer in model] == [nn.Linear, MatrixLinear]


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ("AVX2", torch.float32, True),
        ("AVX2", torch.bfloat16, False),
        ("DEFAULT", torch.float32, False),
        ("SVE256", torch.bfloat16, False),
        ("NO AVX", torch.float64, False),
    ],
)
def test_weights_are_packed_where_that_is_known_to_help(
    monkeypatch: pytest.MonkeyPatch, capability: str, dtype: torch.dtype, expected: bool
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch._C, "_has_mkldnn", True)
    assert packs(dtype, CPU) == expected
    assert not packs(dtype, torch.device("cuda"))
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    assert not packs(dtype, CPU)


@pytest.mark.parametrize("form", ["auto", "int8", "int4"])
def test_other_processors_compute_the_same(
    monkeypatch: pytest.MonkeyPatch, form: WeightFormat
) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    usual, elsewhere = copy.deepcopy(model), copy.deepcopy(model)
    pack(usual, form)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(arrangement, "native_products", lambda: None)
    monkeypatch.setattr(quantized, "_rows_packed_together", lambda: None)
    monkeypatch.setattr(Int4Matrix, "WIDENED_FROM", 1)
    pack(elsewhere, form)
    assert not any(isinstance(module, PackedMatrix) for module in elsewhere.modules())
    assert relative(logits(elsewhere, 5), logits(usual, 5)) < 0.05  # in bf16
    if form != "auto":  # its plain weights are there for whoever saves the model
        layers = [built.model.layers[0] for built in (usual, elsewhere)]
        expected, found = (layer.mlp.down_proj.weight for layer in layers)
        torch.testing.assert_close(found, expected, rtol=0.01, atol=0.001)


class _Reader(nn.Module):
    """Reads the weight of one of its layers by itself, and changes the input of another in
    place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(32, 32, dtype=torch.bfloat16) for _ in range(3)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self.first(hidden)
        hidden += 1
        return nn.functional.linear(output + self.second(hidden), self.third.weight)


@needs_packing
@pytest.mark.usefixtures("onednn")
def test_layers_that_cannot_share_or_be_packed_do_not() -> None:
    model = _Reader()
    plain = copy.deepcopy(model)
    with watch_linears(model) as seen, torch.inference_mode():
        model(torch.ones(2, 32, dtype=torch.bfloat16))
    arrange_weights(model, seen)
    assert type(model.third) is nn.Linear
    assert [type(model.first), type(model.second)] == [MatrixLinear] * 2
    with torch.inference_mode():
        given = torch.randn(3, 32).bfloat16()
        assert torch.equal(model(given.clone()), plain(given.clone()))


def shared(
    *sizes: int, bias: bool = False
) -> tuple[SharedMatrix, list[nn.Linear], list[SharedLinear]]:
    plain = [nn.Linear(64, size, bias=bias, dtype=torch.bfloat16) for size in sizes]
    matrix = SharedMatrix(PackedMatrix(torch.cat([linear.weight for linear in plain])), plain)
    return (
        matrix,
        plain,
        [SharedLinear(linear, matrix, index) for index, linear in enumerate(plain)],
    )


@needs_packing
@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_shared_layers_compute_once_for_one_input(
    monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    matrix, plain, members = shared(32, 64, 48, bias=bias)
    multiply = Mock(side_effect=matrix.matrix.multiply)
    monkeypatch.setattr(matrix.matrix, "multiply", multiply)
    given = torch.randn(1, 5, 64).bfloat16()
    for linear, member in zip(plain, members, strict=True):
        assert torch.equal(member(given), linear(given))
    multiply.assert_called_once()
    assert matrix._held == [None], "nothing is kept once all have their part"


@needs_packing
@pytest.mark.usefixtures("onednn")
@torch.inference_mode()
def test_shared_layers_are_right_in_any_order_of_calls() -> None:
    _, plain, members = shared(32, 64)
    inputs = [torch.randn(1, rows, 64).bfloat16() for rows in (1, 5)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(
        60
    ):  # passes that were left half-way, repeated calls, and outputs that are changed in place
        index, which = (int(torch.randint(2, (), generator=generator)) for _ in range(2))
        output = members[index](inputs[which])
        assert torch.equal(output, plain[index](inputs[which]))
        output.zero_()


@needs_packing
@pytest.mark.usefixtures("onednn")
def test_shared_layers_are_right_in_several_threads() -> None:
    _, plain, members = shared(32, 64, 48)

    @torch.inference_mode()
    def compute(seed: int) -> bool:
        given = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        return all(
            torch.equal(member(given), linear(given))
            for linear, member in zip(plain, members, strict=True)
        )

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(compute, range(400)))


@pytest.mark.parametrize(
    ("kind", "outputs", "inputs", "error"),
    [
        (Int8Matrix, 128, 64, 0.01),
        (Int8Matrix, 48, 96, 0.01),
        (Int4Matrix, 128, 64, 0.1),
        (Int4Matrix, 48, 64, 0.1),
        (Int4Matrix, 2048, 96, 0.1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_quantised_weights_are_near_and_multiplied_by_in_every_way(
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Int8Matrix | Int4Matrix],
    outputs: int,
    inputs: int,
    error: float,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs, dtype=dtype), torch.randn(outputs, dtype=dtype)
    matrix = kind(weight)
    dense = matrix.dense().float()
    assert relative(dense, weight) < error
    given = torch.randn(2, 5, inputs, dtype=dtype)
    expected = given.float() @ dense.T + bias.float()
    for widened_from in (1, 10**6):
        monkeypatch.setattr(kind, "WIDENED_FROM", widened_from)
        output = matrix.multiply(given, bias)
        assert output.dtype == dtype
        assert relative(output, expected) < 6e-3


def test_a_quantised_row_of_zeros_stays_zero() -> None:
    for kind in (Int8Matrix, Int4Matrix):
        matrix = kind(torch.zeros(64, 64))
        assert not matrix.dense().any()
        assert not matrix.multiply(torch.ones(1, 64), None).any()


def relative(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize(("form", "error"), [("int8", 0.05), ("int4", 0.5)])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral-moe", "phi3", "gpt_neox-partial"])
@pytest.mark.parametrize("kernels", ["usual", "portable"])
def test_a_quantised_model_answers_nearly_the_same(
    request: pytest.FixtureRequest, kernels: str, family: str, form: WeightFormat, error: float
) -> None:
    if kernels == "portable":
        request.getfixturevalue("portable")
    model = tiny_model(family)
    quantised = copy.deepcopy(model)
    pack(quantised, form)
    matrices = [module for module in quantised.modules() if _is_quantised(module)]
    assert len(matrices) >= model.config.num_hidden_layers
    for tokens in (1, 40):
        assert 1e-6 < relative(logits(quantised, tokens), logits(model, tokens)) < error


def test_head_routers_and_odd_shapes_keep_16_bits() -> None:
    model = tiny_model("llama", intermediate_size=72).to(torch.bfloat16)
    pack(model, "int4")
    layer = model.model.layers[0]
    assert _is_quantised(layer.self_attn.o_proj)
    kept = (model.lm_head, layer.mlp.down_proj)
    assert all(
        linear.weight.dtype == torch.bfloat16 and not _is_quantised(linear) for linear in kept
    )

    router = AutoConfig.for_model("mixtral", num_local_experts=48, num_experts_per_tok=2)
    assert expert_counts(router) == {48, 2}


def _is_quantised(linear: nn.Module) -> bool:
    return any(isinstance(part, Int8Matrix | Int4Matrix | CodesMatrix) for part in linear.modules())


def test_each_format_has_chunks_of_its_own() -> None:
    names = [
        prepare_model(tiny_model("llama"), None, weights=form).fingerprint
        for form in ("auto", "int8", "int4")
    ]
    assert len(set(names)) == 3
    assert names[0] == fingerprint(tiny_model("llama"))


def test_a_quantised_model_costs_what_it_did() -> None:
    plain, quantised = (
        prepare_model(tiny_model("llama"), None, weights=form).cost for form in ("auto", "int4")
    )
    assert plain.per_token == quantised.per_token


@pytest.mark.parametrize("bits", [8, 4])
def test_quantising_on_a_gpu_names_the_library_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="torchao"):
        quantized.quantise_by_torchao(nn.Linear(8, 8), [], bits)


WRITE_MODELS = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from kvlinker.quality.bench.harness.shapes import byte_tokenizer

for name, layers in (("small", 1), ("large", 16)):
    config = AutoConfig.for_model("llama", hidden_size=1024, intermediate_size=4096,
        num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=8, vocab_size=8000,
        tie_word_embeddings=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    for index, weight in enumerate(model.parameters()):
        weight.data.fill_(0.01 + index / 10000)
    model.save_pretrained(f"{sys.argv[1]}/{name}")
    byte_tokenizer(8000).save_pretrained(f"{sys.argv[1]}/{name}")
"""

LOAD_A_MODEL = """
import gc, sys
from pathlib import Path
from kvlinker.settings import load_settings
from kvlinker.engines.embedded.model_loading import load_model

folder, form = sys.argv[1:]

def load(name):
    return load_model(load_settings(model=f"{folder}/{name}", weights=form, dtype="bfloat16"))

def status(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) * 1024

load("small")  # libraries take their memory
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before, rested = status("VmHWM"), status("VmRSS")
loaded = load("large")
size = Path(folder, "large", "model.safetensors").stat().st_size
memory = [(status("VmHWM") - before) / size, (status("VmRSS") - rested) / size]
print(*memory, type(loaded.model.lm_head).__name__)
"""


@pytest.mark.whole
@needs_packing
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the system does not tell a process's peak"
)
def test_loading_takes_little_more_memory_than_the_model(tmp_path: Path) -> None:
    def run(program: str, *arguments: str) -> list[str]:
        command = [sys.executable, "-c", program, str(tmp_path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    run(WRITE_MODELS)
    # A copy of the weights would double the peak; what libraries hold from run to run is up to a
    # tenth of it.
    peak, left, head = run(LOAD_A_MODEL, "auto")
    assert head == "MatrixLinear"
    assert 0.9 < float(peak) < 1.4
    assert 0.9 < float(left) < 1.2
    peak, left, _ = run(LOAD_A_MODEL, "int4")
    assert float(peak) < 1.4
    assert float(left) < 0.5
