"""Products with plain weights by ``native/plain_products.cpp``: of linear layers whose weights were
not packed, since others read them, too."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from kvlinker.engines import native
from kvlinker.engines.embedded.model.weights.native_products import Product

MOST_ROWS = 16
"""The most rows that native code multiplies for a linear layer by itself. With many more, oneDNN is
as fast where the processor multiplies bf16."""


class PlainProducts:
    """Multiplies rows by weights as PyTorch has them, in bf16, with sums in fp32."""

    def __init__(self) -> None:
        """Load the function, and compare it with PyTorch. Raises NativeUnavailableError."""
        name = "kvlinker_multiply_plain"
        self.function = native.functions("plain_products.cpp", {name: Product})[name]
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).bfloat16()

        weight, inputs, bias = random(70, 100), random(7, 100), random(70)
        expected = nn.functional.linear(inputs.float(), weight.float(), bias.float())
        ours = self.multiply(inputs, weight, bias)
        native.require_close(ours, expected, "the product with plain weights")

    def multiply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``inputs`` [..., width] times ``weight`` [outputs, width] transposed, plus
        ``bias``, all in bf16: [..., outputs]."""
        inputs = inputs.contiguous()
        outputs, width = weight.shape
        output = inputs.new_empty(*inputs.shape[:-1], outputs)
        self.function(
            Product(
                inputs=inputs.data_ptr(),
                rows=inputs.numel() // width,
                width=width,
                weights=weight.data_ptr(),
                outputs=outputs,
                group=width,
                bias=None if bias is None else bias.data_ptr(),
                output=output.data_ptr(),
                threads=torch.get_num_threads(),
            )
        )
        return output


class PlainLinear:
    """Computes what a linear layer does whose weight is plain; many rows are left to the layer."""

    def __init__(self, linear: nn.Linear, products: PlainProducts) -> None:
        self._linear = linear
        self._products = products

    def __call__(self, inputs: Tensor) -> Tensor:
        linear = self._linear
        many = inputs.numel() > MOST_ROWS * inputs.shape[-1]
        if many or inputs.dtype != torch.bfloat16 or linear.weight.dtype != torch.bfloat16:
            return type(linear).forward(linear, inputs)
        return self._products.multiply(inputs, linear.weight, linear.bias)


@cache
def plain_products() -> PlainProducts | None:
    """Return the native products, compiled when first asked for; None if there are none, and the
    log says why."""
    return native.or_fall_back(PlainProducts, "Plain weights are multiplied by PyTorch's kernels")


def multiplies_plain(linear: nn.Linear) -> bool:
    """Return whether native code multiplies by the weight of a plain linear layer."""
    parts = [linear.weight] if linear.bias is None else [linear.weight, linear.bias]
    fits = all(each.is_cpu and each.dtype == torch.bfloat16 for each in parts)
    return fits and all(each.is_contiguous() for each in parts) and plain_products() is not None


def quicken_linears(model: nn.Module) -> None:
    """Let native code multiply few rows by the weights of ``model`` that are plain, in bf16 on
    CPUs. The modules stay as they are but for ``forward``."""
    products = plain_products()
    for module in model.modules():
        if products and type(module) is nn.Linear and multiplies_plain(module):
            module.forward = PlainLinear(module, products)  # type: ignore[assignment]
