"""Native products are those of the weights that they hold, for any numbers of rows, outputs and inputs."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from kvlinker.embedded import native
from kvlinker.embedded.model import matrices, native_products
from kvlinker.embedded.model.matrices import Matrix, PackedMatrix
from kvlinker.embedded.model.native_quantized import NativeInt4Matrix, NativeInt8Matrix
from kvlinker.embedded.model.quantized import Int4Matrix, Int8Matrix

pytestmark = pytest.mark.skipif(native_products.native_products() is None, reason="no native products")

KINDS: list[type[Matrix]] = [PackedMatrix, NativeInt8Matrix, NativeInt4Matrix]


@pytest.mark.parametrize("kind", KINDS)
@given(rows=st.integers(1, 40), outputs=st.integers(1, 150), inputs=st.integers(1, 6).map(lambda count: 32 * count))
@torch.inference_mode()
def test_products_are_those_of_the_dense_weight(kind: type[Matrix], rows: int, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(rows * outputs)
    weight, hidden = (torch.randn(count, inputs, generator=generator).bfloat16() for count in (outputs, rows))
    bias = torch.randn(outputs, generator=generator).bfloat16()
    matrix = kind(weight)
    expected = hidden.float() @ matrix.dense().float().T + bias.float()
    output = matrix.multiply(hidden[None], bias)
    assert output.shape == (1, rows, outputs)
    torch.testing.assert_close(output[0].float(), expected, rtol=0.02, atol=0.02 * inputs**0.5)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_row_is_the_same_beside_others(kind: type[Matrix]) -> None:
    torch.manual_seed(0)
    matrix, hidden = kind(torch.randn(200, 256).bfloat16()), torch.randn(100, 256).bfloat16()
    together = matrix.multiply(hidden, None)
    torch.testing.assert_close(together[57], matrix.multiply(hidden[57:58], None)[0], rtol=0.02, atol=0.1)
    if kind is PackedMatrix:
        assert torch.equal(together[57], matrix.multiply(hidden[57:58], None)[0])


@pytest.mark.parametrize(("native_kind", "portable"), [(NativeInt8Matrix, Int8Matrix), (NativeInt4Matrix, Int4Matrix)])
def test_codes_are_those_of_the_portable_matrices(native_kind: type[Matrix], portable: type[Matrix]) -> None:
    weight = torch.randn(1200, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(native_kind(weight).dense(), portable(weight).dense())


@pytest.mark.parametrize("kind", [NativeInt8Matrix, NativeInt4Matrix])
def test_amx_multiplies_many_rows(kind: type[Matrix], monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hidden = torch.randn(128, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    usual = kind(weight).multiply(hidden, None)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    torch.testing.assert_close(kind(weight).multiply(hidden, None), usual, rtol=0.02, atol=0.3)


def test_an_unknown_order_is_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "_block_of", lambda rows: rows.flatten())
    weight, hidden = torch.randn(128, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    matrix = PackedMatrix(weight)
    monkeypatch.setattr(native_products.NativeProducts, "multiply", None)
    assert torch.equal(matrix.multiply(hidden, None), torch.nn.functional.linear(hidden, weight))


@pytest.fixture
def anew() -> Iterator[None]:
    native_products.native_products.cache_clear()
    yield
    native_products.native_products.cache_clear()


@pytest.mark.usefixtures("anew")
def test_wrong_products_are_not_trusted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(native_products, "LARGEST_ERROR", 0.0)
    with caplog.at_level("INFO"):
        assert native_products.native_products() is None
    assert "wrong on this machine" in caplog.text


@pytest.mark.usefixtures("anew")
def test_without_a_compiler_pytorch_multiplies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(source: object) -> None:
        raise native.NativeUnavailableError("no compiler")

    monkeypatch.setattr(native, "load_library", missing)
    with caplog.at_level("INFO"):
        assert native_products.native_products() is None
    assert "PyTorch's kernels: no compiler" in caplog.text
