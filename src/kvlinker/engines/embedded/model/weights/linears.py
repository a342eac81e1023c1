"""Linear layers whose weights are matrices of their own, or a part of a matrix that layers with one
input share; and those whose weights stay plain, since others read them, too.

They take the places of a loaded model's ``nn.Linear``: see
``kvlinker.engines.embedded.model.weights.arrangement``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvlinker.engines.embedded.model.weights.matrices import Matrix
from kvlinker.engines.embedded.model.weights.native_products import native_products

PLAIN_ROW_LIMIT = 16
"""The most rows that native code multiplies by a plain weight for a linear layer by itself. With
many more, oneDNN is as fast where the processor multiplies bf16."""


class MatrixLinear(nn.Linear):
    """A linear layer whose weight is a ``Matrix``."""

    def __init__(self, linear: nn.Linear, matrix: Matrix) -> None:
        """Do what ``linear`` does, by ``matrix``, which was made of its weight."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.matrix = matrix
        self.register_parameter("bias", linear.bias)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A plain copy of the weight [out_features, in_features], made anew each time, for code
        that saves it."""
        return self.matrix.dense()

    def forward(self, input: Tensor) -> Tensor:
        return self.matrix.multiply(input, self.bias)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Write what a plain linear layer writes."""
        destination[f"{prefix}weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)


class SharedMatrix(nn.Module):
    """One matrix for several linear layers that are called with the same tensor, one after another.

    The first layer computes the output of all, and the others take their parts. A layer that is
    called with another tensor computes anew, so that any order of calls is right, in several
    threads too.
    """

    def __init__(self, matrix: Matrix, linears: Sequence[nn.Linear]) -> None:
        """``matrix`` holds the rows of all ``linears``, in their order. All of them have a bias, or
        none."""
        super().__init__()
        self.matrix = matrix
        self._sizes = [linear.out_features for linear in linears]
        biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self._held: list[tuple[Tensor, list[Tensor | None]] | None] = [
            None
        ]  # setting attributes of modules is slow

    def part(self, index: int, inputs: Tensor) -> Tensor:
        """Return the output [..., out_features] of the layer with this index for ``inputs`` [...,
        in_features]."""
        latest = self._held[0]
        output = latest[1][index] if latest is not None and latest[0] is inputs else None
        if latest is None or output is None:
            outputs = self.matrix.multiply(inputs, self.bias).split_with_sizes(self._sizes, dim=-1)
            output, latest = outputs[index], (inputs, list(outputs))
            self._held[0] = latest
        latest[1][index] = None  # the caller may change it
        if not any(part is not None for part in latest[1]):
            self._held[0] = None
        return output

    @property
    def outputs(self) -> int:
        """The number of outputs of all layers together."""
        return sum(self._sizes)

    def weight_of(self, index: int) -> Tensor:
        """Return a plain copy of the weight of the layer with this index: [out_features,
        in_features]."""
        return torch.split(self.matrix.dense(), self._sizes)[index].clone()

    def bias_of(self, index: int) -> Tensor | None:
        """Return the bias of the layer with this index: [out_features]."""
        return None if self.bias is None else torch.split(self.bias, self._sizes)[index]

    def _save_to_state_dict(self, *args: object) -> None:
        """Write nothing: the linear layers write their parts."""


class SharedLinear(nn.Linear):
    """A linear layer whose weight is a part of a ``SharedMatrix``."""

    def __init__(self, linear: nn.Linear, shared: SharedMatrix, index: int) -> None:
        """Do what ``linear`` does, as the layer of ``shared`` with this index."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.shared = shared
        self._index = index

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A plain copy of the weight [out_features, in_features], made anew each time, for code
        that saves it."""
        return self.shared.weight_of(self._index)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The bias [out_features], if there is one."""
        return self.shared.bias_of(self._index)

    def forward(self, input: Tensor) -> Tensor:
        return self.shared.part(self._index, input)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Write what a plain linear layer writes."""
        destination[f"{prefix}weight"] = self.weight
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias


def _plain_product(linear: nn.Linear, inputs: Tensor) -> Tensor:
    """Return what a linear layer computes whose weight is plain; many rows are left to the
    layer."""
    outputs, width = linear.weight.shape
    products = native_products()
    many = inputs.numel() > PLAIN_ROW_LIMIT * width
    is_bf16 = inputs.dtype == linear.weight.dtype == torch.bfloat16
    if many or not is_bf16 or products is None:
        return type(linear).forward(linear, inputs)
    address = linear.weight.data_ptr()
    return products.multiply("plain", inputs, address, outputs, group=width, bias=linear.bias)


def multiplies_plain(linear: nn.Linear) -> bool:
    """Return whether native code multiplies by the weight of a plain linear layer."""
    parts = [linear.weight] if linear.bias is None else [linear.weight, linear.bias]
    fits = all(each.is_cpu and each.dtype == torch.bfloat16 for each in parts)
    return fits and all(each.is_contiguous() for each in parts) and native_products() is not None


def quicken_linears(model: nn.Module) -> None:
    """Let native code multiply few rows by the weights of ``model`` that are plain, in bf16 on
    CPUs. Only the modules' ``forward`` changes."""
    for module in model.modules():
        if type(module) is nn.Linear and multiplies_plain(module):
            module.forward = partial(_plain_product, module)  # type: ignore[method-assign]
