"""Codes of weights are multiplied by inputs that are rounded to 8 bits as PyTorch multiplies them,
exactly, and inputs keep 16 bits where rounding would do harm."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from kvlinker.engines.embedded.model.weights.native_products import (
    native_products,
    rounded_to_bytes,
)
from kvlinker.engines.embedded.model.weights.native_quantized import (
    CodesMatrix,
    NativeInt4Matrix,
    NativeInt8Matrix,
    multiplied_in_int8,
)
from kvlinker.engines.embedded.model.weights.quantized import int4_group
from kvlinker.engines.embedded.model_loading import prepare_model
from tests.engines.native.native_targets import EACH, VNNI_OF_AVX2, passing_for
from tests.toy_models import tiny_model

pytestmark = [
    pytest.mark.skipif(native_products() is None, reason="no native products"),
    pytest.mark.usefixtures("target"),
]

ROWS = (1, 2, 5, 6, 7, 12, 13, 33, 64, 145, 256)
Kind = type[NativeInt8Matrix | NativeInt4Matrix]
KINDS: list[Kind] = [NativeInt8Matrix, NativeInt4Matrix]


@pytest.fixture(scope="module", params=[*EACH, *VNNI_OF_AVX2])
def target(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each kind of processor that this one is of."""
    native_products.cache_clear()
    with passing_for(request.param):
        assert native_products() is not None
        yield
    native_products.cache_clear()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def matrix_of(kind: Kind, weight: Tensor) -> CodesMatrix:
    """A matrix by which rounded inputs are multiplied."""
    matrix = kind(weight)
    if isinstance(matrix, NativeInt8Matrix):
        matrix.round_inputs()
    return matrix


def whole(low: int, high: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(low, high + 1, shape, generator=generator).bfloat16()


def rounded_inputs(rows: int, width: int, group: int) -> Tensor:
    """Inputs that rounding leaves as they are: whole numbers up to 127 times a power of two,
    another one for each group of each row."""
    numbers = whole(-127, 127, rows, width)
    numbers[:, group - 1 :: group] = numbers[:, -1] = -127
    groups = -(-width // group)
    sizes = 2 ** whole(-3, 3, rows, groups)
    return numbers * sizes.repeat_interleave(group, dim=1)[:, :width]


def check_8_bits(rows: int, outputs: int, width: int) -> None:
    weight = whole(-127, 127, outputs, width)
    weight[:, 0] = 127  # so that scales are 1
    inputs = rounded_inputs(rows, width, NativeInt8Matrix.GROUP)
    output = matrix_of(NativeInt8Matrix, weight).multiply(inputs, None)
    assert torch.equal(output, (inputs.double() @ weight.double().T).float().bfloat16())


def check_4_bits(rows: int, outputs: int, width: int) -> None:
    group = int4_group(width)
    weight, inputs = whole(-8, 7, outputs, width), rounded_inputs(rows, width, group)
    weight[:, ::group], weight[:, 1::group] = -8, 7  # so that scales are 1
    weight += whole(-5, 5, outputs, width // group).repeat_interleave(group, dim=1)
    output = matrix_of(NativeInt4Matrix, weight).multiply(inputs, None)
    assert torch.equal(output, (inputs.double() @ weight.double().T).float().bfloat16())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "width"), [(70, 36), (192, 1000), (5, 4), (65, 512)])
def test_rounded_inputs_are_multiplied_exactly_in_8_bits(
    rows: int, outputs: int, width: int
) -> None:
    check_8_bits(rows, outputs, width)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "width"), [(70, 32), (192, 1056), (5, 128), (65, 512)])
def test_rounded_inputs_are_multiplied_exactly_in_4_bits(
    rows: int, outputs: int, width: int
) -> None:
    check_4_bits(rows, outputs, width)


def test_the_largest_numbers_do_not_overflow() -> None:
    weight, inputs = torch.full((64, 1 << 16), 127.0).bfloat16(), whole(127, 127, 2, 1 << 16)
    inputs[1] *= -1
    output = matrix_of(NativeInt8Matrix, weight).multiply(inputs, None)
    exact = torch.tensor(127.0 * 127 * (1 << 16))
    assert torch.equal(output, torch.stack([exact, -exact])[:, None].bfloat16().expand(2, 64))


@pytest.mark.parametrize("kind", KINDS)
@given(
    rows=st.integers(1, 60),
    outputs=st.integers(1, 150),
    groups=st.integers(1, 20),
    size=st.sampled_from([1e-20, 1e-3, 1.0, 1e5]),
)
@torch.inference_mode()
def test_products_are_those_of_rounded_inputs(
    kind: Kind, rows: int, outputs: int, groups: int, size: float
) -> None:
    matrix = matrix_of(kind, random(outputs, 32 * groups))
    inputs = size * random(rows, 32 * groups, seed=1)
    met, dense = rounded_to_bytes(inputs, matrix.group), matrix.dense().float().T
    output = matrix.multiply(inputs[None], None)
    assert output.shape == (1, rows, outputs)
    error = (output[0].float() - met @ dense).norm()
    assert error < 4e-3 * (met.abs() @ dense.abs()).norm()  # the dense weight is rounded, too


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_beside_any_others(kind: Kind) -> None:
    matrix, inputs = matrix_of(kind, random(200, 256)), random(61, 256)
    inputs[7] *= 1000
    together = matrix.multiply(inputs, None)
    for row in range(61):
        for count in (1, 4, 13):
            alone = matrix.multiply(inputs[row : row + count], None)
            assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_gives_nan_alone(kind: Kind, number: float) -> None:
    matrix, inputs = matrix_of(kind, random(70, 64)), random(8, 64)
    expected = matrix.multiply(inputs, None)
    inputs[3, 5] = number
    output = matrix.multiply(inputs, None)
    assert output[3].isnan().all()
    kept = [row for row in range(8) if row != 3]
    assert torch.equal(output[kept], expected[kept])


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_give_zeros(kind: Kind) -> None:
    matrix = matrix_of(kind, random(70, 64))
    assert not matrix.multiply(torch.zeros(3, 64).bfloat16(), None).any()
    assert matrix.multiply(torch.zeros(0, 64).bfloat16(), None).shape == (0, 70)


def test_inputs_with_outliers_keep_16_bits() -> None:
    weight, inputs = random(128, 512), random(32, 512, seed=1)
    matrix = NativeInt8Matrix(weight, inputs)
    assert matrix.form == "int8_int8"
    assert 0.005 < matrix.rounding_error < 0.012
    assert NativeInt8Matrix(weight).form == "int8"
    changing, constant = inputs.clone(), inputs.clone()
    changing[:, 37::256] *= 300
    constant[:, 37::256] = 300.0  # outputs are far larger than others', but the same for all
    for outliers in (changing, constant):
        matrix = NativeInt8Matrix(weight, outliers)
        assert matrix.form == "int8"
        assert matrix.rounding_error > 0.03
        dense = outliers.float() @ matrix.dense().float().T
        error = (matrix.multiply(outliers, None).float() - dense).norm() / dense.norm()
        assert error < 4e-3


def test_a_token_that_is_far_larger_than_others_does_not_hide_them() -> None:
    weight, inputs = random(128, 512), random(32, 512, seed=1)
    inputs[:, 37::256] = 300.0
    inputs[0] *= 1e4
    assert NativeInt8Matrix(weight, inputs).form == "int8"


def test_large_inputs_leave_few_bits_to_those_of_their_group_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = random(128, 2816)
    inputs = torch.nn.functional.silu(random(32, 2816, seed=1)) * random(32, 2816, seed=2)
    inputs[:, 37] = 10.0
    matrix = NativeInt8Matrix(weight, inputs)
    assert (matrix.form, matrix.group) == ("int8_int8", 256)
    monkeypatch.setattr(NativeInt8Matrix, "GROUP", 2816)
    whole_rows = NativeInt8Matrix(weight, inputs)
    assert (whole_rows.form, whole_rows.group) == ("int8", 2816)
    assert whole_rows.rounding_error > 2 * matrix.rounding_error


def test_a_models_layers_with_outliers_keep_16_bits(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    first = model.model.layers[0]
    with torch.no_grad():  # the same function
        first.input_layernorm.weight[5] *= 256
        for name in "qkv":
            getattr(first.self_attn, f"{name}_proj").weight[:, 5] /= 256
    with caplog.at_level(logging.INFO):
        layers = prepare_model(model, None, weights="int8").model.model.layers
    outlying, usual = (layer.self_attn.q_proj.shared.matrix for layer in layers[:2])
    assert (outlying.form, usual.form) == ("int8", "int8_int8")
    matrices = 4 * len(layers)
    said = f"{matrices - 1} of {matrices} matrices in 8 bits"
    assert said in multiplied_in_int8(model)
    assert said in caplog.text
