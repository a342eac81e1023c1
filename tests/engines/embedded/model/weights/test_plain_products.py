"""Products with plain weights are PyTorch's."""

import pytest
import torch
from torch import nn

from kvlinker.engines.embedded.model.weights.plain_products import (
    MOST_ROWS,
    PlainLinear,
    plain_products,
    quicken_linears,
)

pytestmark = pytest.mark.skipif(plain_products() is None, reason="no native products")


@pytest.mark.parametrize("rows", [0, 1, 4, 7])
@pytest.mark.parametrize(("outputs", "width"), [(3, 5), (64, 32), (130, 100)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_pytorchs(rows, outputs, width, with_bias):
    generator = torch.Generator().manual_seed(0)
    weight, inputs = (
        torch.randn(count, width, generator=generator).bfloat16() for count in (outputs, rows)
    )
    bias = torch.randn(outputs, generator=generator).bfloat16() if with_bias else None
    products = plain_products()
    assert products is not None
    found = products.multiply(inputs, weight, bias)
    expected = nn.functional.linear(
        inputs.float(), weight.float(), None if bias is None else bias.float()
    )
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=1e-2)


@torch.inference_mode()
def test_many_rows_and_other_precisions_are_left_to_the_layer(monkeypatch):
    linear = nn.Linear(40, 70).bfloat16()
    quicken_linears(linear)
    assert isinstance(linear.forward, PlainLinear)
    taken = []
    monkeypatch.setattr(type(plain_products()), "multiply", lambda self, *args: taken.append(args))
    linear(torch.randn(1, MOST_ROWS, 40).bfloat16())
    assert len(taken) == 1
    assert linear(torch.randn(1, MOST_ROWS + 1, 40).bfloat16()).shape == (1, MOST_ROWS + 1, 70)
    linear.float()
    assert linear(torch.randn(1, 40)).dtype == torch.float32
    assert len(taken) == 1
