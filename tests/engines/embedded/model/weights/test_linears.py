"""Products of linear layers with plain weights are PyTorch's."""

import pytest
import torch
from torch import nn

from kvlinker.engines.embedded.model.weights.linears import (
    PLAIN_ROW_LIMIT,
    quicken_linears,
)
from kvlinker.engines.embedded.model.weights.native_products import native_products

pytestmark = pytest.mark.skipif(native_products() is None, reason="no native products")


@pytest.mark.parametrize("rows", [0, 1, 4, 7])
@pytest.mark.parametrize(("outputs", "width"), [(3, 5), (64, 32), (130, 100)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_pytorchs(rows, outputs, width, with_bias):
    generator = torch.Generator().manual_seed(0)
    weight, inputs = (
        torch.randn(count, width, generator=generator).bfloat16() for count in (outputs, rows)
    )
    bias = torch.randn(outputs, generator=generator).bfloat16() if with_bias else None
    products = native_products()
    assert products is not None
    found = products.multiply("plain", inputs, weight.data_ptr(), outputs, group=width, bias=bias)
    expected = nn.functional.linear(
        inputs.float(), weight.float(), None if bias is None else bias.float()
    )
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=1e-2)


@torch.inference_mode()
def test_many_rows_and_other_precisions_are_left_to_the_layer(monkeypatch):
    linear = nn.Linear(40, 70).bfloat16()
    quicken_linears(linear)
    assert "forward" in vars(linear)
    taken = []
    monkeypatch.setattr(
        type(native_products()), "multiply", lambda self, *args, **_: taken.append(args)
    )
    linear(torch.randn(1, PLAIN_ROW_LIMIT, 40).bfloat16())
    assert len(taken) == 1
    many = torch.randn(1, PLAIN_ROW_LIMIT + 1, 40).bfloat16()
    assert linear(many).shape == (1, PLAIN_ROW_LIMIT + 1, 70)
    linear.float()
    assert linear(torch.randn(1, 40)).dtype == torch.float32
    assert len(taken) == 1
