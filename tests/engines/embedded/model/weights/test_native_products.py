"""Native products are those of the weights that they hold, for any numbers of rows, outputs and
inputs."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from kvlinker.engines import native
from kvlinker.engines.embedded.model.weights import matrices, native_products
from kvlinker.engines.embedded.model.weights.matrices import (
    BlockedMatrix,
    Matrix,
    PackedMatrix,
    packs,
)
from kvlinker.engines.embedded.model.weights.native_quantized import (
    NativeInt4Matrix,
    NativeInt8Matrix,
)
from kvlinker.engines.embedded.model.weights.quantized import Int4Matrix, Int8Matrix
from tests.engines.native.machine_code import functions, readable

pytestmark = pytest.mark.skipif(
    native_products.native_products() is None, reason="no native products"
)

needs_blocks = pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported() or not torch.cpu._is_avx512_bf16_supported(),
    reason="oneDNN multiplies with AMX, or orders weights otherwise",
)

needs_packing = pytest.mark.skipif(
    not packs(torch.bfloat16, torch.device("cpu")), reason="the CPU has no packed bf16 weights"
)

KINDS = [
    pytest.param(PackedMatrix, marks=needs_packing),
    *(BlockedMatrix, NativeInt8Matrix, NativeInt4Matrix),
]


@pytest.mark.parametrize("kind", KINDS)
@given(
    rows=st.integers(1, 120),
    outputs=st.integers(1, 150),
    inputs=st.integers(1, 6).map(lambda count: 32 * count),
)
@torch.inference_mode()
def test_products_are_those_of_the_dense_weight(
    kind: type[Matrix], rows: int, outputs: int, inputs: int
) -> None:
    generator = torch.Generator().manual_seed(rows * outputs)
    weight, hidden = (
        torch.randn(count, inputs, generator=generator).bfloat16() for count in (outputs, rows)
    )
    bias = torch.randn(outputs, generator=generator).bfloat16()
    matrix = kind(weight)
    expected = hidden.float() @ matrix.dense().float().T + bias.float()
    output = matrix.multiply(hidden[None], bias)
    assert output.shape == (1, rows, outputs)
    atol = (0.04 if kind is NativeInt4Matrix else 0.02) * inputs**0.5  # it rounds inputs, too
    torch.testing.assert_close(output[0].float(), expected, rtol=0.02, atol=atol)


@needs_blocks
@torch.inference_mode()
def test_a_row_in_bf16_is_bit_identical_beside_others() -> None:
    torch.manual_seed(0)
    matrix, hidden = (
        PackedMatrix(torch.randn(200, 256).bfloat16()),
        torch.randn(PackedMatrix.NATIVE_UP_TO, 256).bfloat16(),
    )
    assert matrix._native_up_to == len(hidden)
    together = matrix.multiply(hidden, None)
    for row in (0, 57, 127, 511):
        assert torch.equal(together[row], matrix.multiply(hidden[row : row + 1], None)[0])


@pytest.mark.parametrize("kind", [BlockedMatrix, NativeInt8Matrix, NativeInt4Matrix])
@torch.inference_mode()
def test_a_row_in_blocks_is_nearly_the_same_beside_others(kind: type[Matrix]) -> None:
    torch.manual_seed(0)
    matrix, hidden = kind(torch.randn(200, 256).bfloat16()), torch.randn(100, 256).bfloat16()
    together = matrix.multiply(hidden, None)
    torch.testing.assert_close(
        together[57], matrix.multiply(hidden[57:58], None)[0], rtol=0.02, atol=0.1
    )


@torch.inference_mode()
def test_many_rows_are_multiplied_in_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, rows = (
        torch.randn(count, 64, generator=generator).bfloat16() for count in (70, 1025)
    )  # parts of 341, 342 and 342
    matrix = BlockedMatrix(weight)
    apart = [matrix.multiply(part, None) for part in (rows[:341], rows[341:683], rows[683:])]
    assert torch.equal(matrix.multiply(rows, None), torch.cat(apart))


@needs_blocks
@pytest.mark.parametrize("rows", [0, 511, 512, 513])
@torch.inference_mode()
def test_no_rows_and_as_many_as_native_code_takes(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight, hidden = torch.randn(128, 64).bfloat16(), torch.randn(1, rows, 64).bfloat16()
    packed = PackedMatrix(weight)
    assert packed._native_up_to == 512
    taken = Mock(side_effect=native_products.native_products().multiply)  # type: ignore[union-attr]
    monkeypatch.setattr(native_products.NativeProducts, "multiply", taken)
    for matrix in (packed, NativeInt8Matrix(weight), NativeInt4Matrix(weight)):
        expected = hidden.float() @ matrix.dense().float().T
        atol = 0.32 if isinstance(matrix, NativeInt4Matrix) else 0.2  # it rounds inputs, too
        torch.testing.assert_close(
            matrix.multiply(hidden, None).float(), expected, rtol=0.02, atol=atol
        )
    assert [call.args[0] for call in taken.call_args_list] == ["bf16"] * (rows <= 512) + [
        "int8",
        "int4",
    ]


@readable
@pytest.mark.parametrize(
    ("target", "step", "instruction", "count", "most_moved"),
    [
        ("avx512-bf16", "9PairsStep6InBf16", "vdpbf16ps", 24, 0),
        ("avx512", "10FloatsStep6InBf16", "vfmadd231ps", 24, 0),
        ("avx2", "10FloatsStep6InBf16", "vfmadd231ps", 12, 0),
        ("avx512-vnni", "9BytesStepI7In8BitsE", "vpdpbusd", 24, 0),
        # GCC 12 has two of the 24 sums elsewhere for a while, though registers are left.
        ("avx512-vnni", "9BytesStepI7In4BitsE", "vpdpbusd", 48, 6),
        ("avx2-vnni", "9BytesStepI7In8BitsE", "vpdpbusd", 12, 0),
        ("avx2", "9BytesStepI7In4BitsE", "vpmaddubsw", 12, 0),
    ],
)
def test_six_rows_keep_their_sums_in_registers(
    target: str, step: str, instruction: str, count: int, most_moved: int
) -> None:
    (function,) = functions("products.cpp", target, rf"8multiplyI{step}\w*Li6E")
    products = [line for line, text in enumerate(function) if instruction in text]
    assert len(products) == count
    loop = function[products[0] : products[-1]]
    assert sum("%rsp" in text or "%rbp" in text for text in loop) <= most_moved


@torch.inference_mode()
def test_no_rows_in_fp32() -> None:
    assert PackedMatrix(torch.randn(128, 64)).multiply(torch.randn(1, 0, 64), None).shape == (
        1,
        0,
        128,
    )


@pytest.mark.parametrize(
    ("native_kind", "portable"), [(NativeInt8Matrix, Int8Matrix), (NativeInt4Matrix, Int4Matrix)]
)
def test_codes_are_those_of_the_portable_matrices(
    native_kind: type[Matrix], portable: type[Matrix]
) -> None:
    weight = torch.randn(1200, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(native_kind(weight).dense(), portable(weight).dense())


@pytest.mark.parametrize("kind", [NativeInt8Matrix, NativeInt4Matrix])
def test_amx_multiplies_many_rows(kind: type[Matrix], monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hidden = torch.randn(128, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    usual = kind(weight).multiply(hidden, None)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    torch.testing.assert_close(kind(weight).multiply(hidden, None), usual, rtol=0.02, atol=0.3)


@needs_packing
def test_amx_multiplies_any_rows_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    weight, hidden = torch.randn(128, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    assert torch.equal(
        PackedMatrix(weight).multiply(hidden, None), torch.nn.functional.linear(hidden, weight)
    )


@needs_packing
def test_an_unknown_order_is_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "bf16_blocks", lambda rows: rows.reshape(1, -1))
    monkeypatch.setattr(matrices, "_READABLE", {})
    weight, hidden = torch.randn(128, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    matrix = PackedMatrix(weight)
    monkeypatch.setattr(native_products.NativeProducts, "multiply", None)
    assert torch.equal(matrix.multiply(hidden, None), torch.nn.functional.linear(hidden, weight))


@pytest.mark.usefixtures("native_anew")
@pytest.mark.parametrize("wrong", ["plain", "bf16", "int8", "int8_int8", "int4"])
def test_wrong_products_are_not_trusted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    multiply = native_products.NativeProducts.multiply

    def wrongly(
        products: Any, form: native_products.Form, *given: Any, **options: Any
    ) -> torch.Tensor:
        return multiply(products, form, *given, **options) * (2 if form == wrong else 1)

    monkeypatch.setattr(native_products.NativeProducts, "multiply", wrongly)
    with caplog.at_level("INFO"):
        assert native_products.native_products() is None
    assert f"{wrong} by native code is wrong on this machine" in caplog.text


@pytest.mark.usefixtures("native_anew")
def test_without_a_compiler_pytorch_multiplies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(source: object, target: object) -> None:
        raise native.NativeUnavailableError("no compiler")

    monkeypatch.setattr(native, "load_library", missing)
    with caplog.at_level("INFO"):
        assert native_products.native_products() is None
    assert "PyTorch's kernels: no compiler" in caplog.text
