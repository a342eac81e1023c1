"""Experts by native code are those of the model's modules, for any numbers of rows and choices."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvlinker.engines.contract.model_files import expert_counts, fingerprint, has_common_experts
from kvlinker.engines.embedded.model.weights import experts as module_of_experts
from kvlinker.engines.embedded.model.weights.experts import PackedExperts, arrange_experts
from kvlinker.engines.embedded.model.weights.native_experts import native_experts, weighted_sum
from kvlinker.engines.embedded.model.weights.native_quantized import NativeInt8Matrix
from kvlinker.engines.embedded.model.weights.samples import sampled_inputs
from kvlinker.settings import WeightFormat
from tests.toy_models import tiny_model

pytestmark = pytest.mark.skipif(
    native_experts() is None or torch.cpu._is_amx_tile_supported(),
    reason="experts are PyTorch's to multiply here",
)

EXPERTS, WIDTH = 6, 64
FAMILIES = ["mixtral-moe", "gpt_oss-sinks", "deepseek_v3-latents-interleaved"]
"""Experts that are gated, with biases and clamped, and beside others that all rows get."""


@pytest.fixture(scope="module", params=FAMILIES)
def exact(request: pytest.FixtureRequest) -> Any:
    """A model in fp32 whose weights are those of bf16."""
    options = "n_routed_experts" if "deepseek" in request.param else "num_local_experts"
    return tiny_model(request.param, **{options: EXPERTS}).bfloat16().float()


def experts_of(model: nn.Module) -> Any:
    """The last layer's experts."""
    return [module for name, module in model.named_modules() if name.endswith(".experts")][-1]


def packed(model: Any, weights: WeightFormat = "auto") -> PackedExperts:
    copied = copy.deepcopy(model).bfloat16()
    arrange_experts(copied, weights, {})
    found = experts_of(copied)
    assert isinstance(found, PackedExperts)
    return found


def routed(rows: int, *, among: int = EXPERTS) -> tuple[Tensor, Tensor, Tensor]:
    """Random rows, two different experts for each, and their weights."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, WIDTH, generator=generator).bfloat16()
    first = torch.randint(among, (rows,), generator=generator)
    further = torch.randint(1, among, (rows,), generator=generator)
    chosen = torch.stack([first, (first + further) % among], dim=1)
    return hidden, chosen, torch.rand(rows, 2, generator=generator).bfloat16()


def relative(ours: Tensor, expected: Tensor) -> float:
    return float((ours.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("threads", [1, 2])
@torch.inference_mode()
def test_any_rows_are_as_exact_as_by_the_models_own(exact: Any, threads: int) -> None:
    ours, plain = packed(exact), experts_of(copy.deepcopy(exact).bfloat16())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (1, 3, 17, 65, 300):
            for among in (2, EXPERTS):  # most have no rows, or all have some
                hidden, chosen, weights = routed(rows, among=among)
                expected = experts_of(exact)(hidden.float(), chosen, weights.float())
                theirs = relative(plain(hidden, chosen, weights), expected)
                assert relative(ours(hidden, chosen, weights), expected) < theirs + 1e-3
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def test_a_row_is_the_same_whoever_is_beside_it(exact: Any) -> None:
    ours = packed(exact)
    hidden, chosen, weights = routed(65)
    together = ours(hidden, chosen, weights)
    for row in (0, 31, 64):
        alone = slice(row, row + 1)
        assert torch.equal(ours(hidden[alone], chosen[alone], weights[alone])[0], together[row])


@torch.inference_mode()
def test_no_rows_and_rows_for_no_expert(exact: Any) -> None:
    ours = packed(exact)
    hidden, chosen, weights = routed(5)
    assert ours(hidden[:0], chosen[:0], weights[:0]).shape == (0, WIDTH)
    expected = ours(hidden, chosen, weights)
    chosen[2] = EXPERTS  # as where experts are divided among processes
    found = ours(hidden, chosen, weights)
    assert torch.equal(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
    assert not found[2].any()


@pytest.mark.parametrize(("weights", "error"), [("int8", 0.03), ("int4", 0.3)])
@torch.inference_mode()
def test_weights_in_fewer_bits(exact: Any, weights: WeightFormat, error: float) -> None:
    ours = packed(exact, weights)
    for rows in (1, 33, 120):
        given = routed(rows)
        expected = experts_of(exact)(
            *(each.float() if each.is_floating_point() else each for each in given)
        )
        assert 1e-3 < relative(ours(*given), expected) < error


@torch.inference_mode()
def test_inputs_are_rounded_to_8_bits_where_samples_allow_it() -> None:
    model = tiny_model("mixtral-moe")
    with sampled_inputs(model) as sampled:
        model(torch.arange(3, 99)[None])
    arrange_experts(model, "int8", sampled)
    forms = [each.form for each in model.modules() if isinstance(each, NativeInt8Matrix)]
    assert forms == ["int8_int8"] * 2 * 4 * model.config.num_hidden_layers
    hidden, chosen, weights = routed(20, among=4)
    own = experts_of(tiny_model("mixtral-moe"))(hidden.float(), chosen, weights.float())
    ours = experts_of(model)(hidden.float(), chosen, weights.float())
    assert ours.dtype == torch.float32
    assert relative(ours, own) < 0.03


def test_plain_weights_are_freed_saved_and_copied(exact: Any) -> None:
    model = copy.deepcopy(exact).bfloat16()
    before, name = (
        {key: each.clone() for key, each in model.state_dict().items()},
        fingerprint(model),
    )
    size = sum(each.nbytes for each in model.parameters())
    arrange_experts(model, "auto", {})
    assert fingerprint(model) == name
    assert all(torch.equal(model.state_dict()[key], each) for key, each in before.items())
    filled_up = sum(matrix.blocks.nbytes for matrix in model.modules() if hasattr(matrix, "blocks"))
    assert sum(each.nbytes for each in model.parameters()) <= size + filled_up / 2
    given = routed(3)
    with torch.inference_mode():
        expected = experts_of(model)(*given)
        assert torch.equal(experts_of(copy.deepcopy(model))(*given), expected)


def test_experts_of_other_forms_stay_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)

    def reason(
        family: str, weights: WeightFormat = "auto", dtype: torch.dtype = torch.bfloat16
    ) -> str:
        caplog.clear()
        model = tiny_model(family).to(dtype)
        arrange_experts(model, weights, {})
        assert not any(isinstance(each, PackedExperts) for each in model.modules())
        return caplog.records[-1].getMessage() if caplog.records else ""

    assert reason("llama") == ""
    own_form = "native code does not know the form of Llama4TextExperts"
    assert own_form in reason("llama4-interleaved-nope")
    assert "they are in float32" in reason("mixtral-moe", dtype=torch.float32)
    monkeypatch.setattr(module_of_experts, "weighted_sum", lambda *given: 2 * weighted_sum(*given))
    assert "differs from MixtralExperts by 1.0e+00, more than 0.01" in reason("mixtral-moe")
    monkeypatch.setattr(module_of_experts, "native_experts", lambda: None)
    assert "there is no native code for this machine" in reason("mixtral-moe")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert "AMX" in reason("mixtral-moe")


@pytest.mark.parametrize(
    ("family", "common"), [("mixtral-moe", True), ("llama4-interleaved-nope", False)]
)
def test_a_configuration_says_whether_experts_have_the_common_form(
    family: str, common: bool
) -> None:
    config = tiny_model(family).config
    assert expert_counts(config)
    assert has_common_experts(config) == common
