"""Products with the weights of experts by ``native/experts.cpp``, in the forms that
``kvlinker.engines.embedded.model.weights.native_products`` multiplies by, on CPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from kvlinker.engines import native
from kvlinker.engines.embedded.model.weights.matrices import Matrix, NativeWeights
from kvlinker.engines.embedded.model.weights.native_products import Product, native_products


class ExpertMatrices(nn.Module):
    """Holds one matrix for each expert, all of one shape; native code multiplies by all of them."""

    _table: ctypes.Array[_Expert] | None = None
    """The matrices as native code takes them, once it has."""

    def __init__(self, matrices: Sequence[Matrix], biases: Tensor | None = None) -> None:
        """``biases`` [experts, outputs], bf16, are added to the products."""
        super().__init__()
        self.matrices = nn.ModuleList(matrices)
        self.biases = None if biases is None else nn.Parameter(biases, requires_grad=False)

    def multiply(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Return the product of each row with the matrix of each expert that is chosen for it:
        [pairs, outputs], bf16.

        ``rows`` [rows, width] are bf16. ``chosen`` [pairs], int64, are numbers of experts, as many
        neighbours for each row; of a number that no expert has, the product is zeros.
        """
        rows, chosen = rows.contiguous(), chosen.contiguous()
        assert (rows.dtype, chosen.dtype) == (torch.bfloat16, torch.int64), (rows, chosen)
        functions = native_experts()
        assert functions is not None, "weights were packed for a processor with native code"
        table = self._experts()
        outputs = table[0].product.outputs
        output = rows.new_empty(len(chosen), outputs)
        functions["kvlinker_multiply_experts"](
            _Experts(
                inputs=rows.data_ptr(),
                width=rows.shape[1],
                pairs=len(chosen),
                together=max(1, len(chosen) // max(1, len(rows))),
                chosen=chosen.data_ptr(),
                experts=ctypes.addressof(table),
                count=len(table),
                outputs=outputs,
                output=output.data_ptr(),
                threads=torch.get_num_threads(),
            )
        )
        return output

    @property
    def width(self) -> int:
        """The number of inputs of each matrix."""
        return int(self._experts()[0].product.width)

    def dense(self) -> Tensor:
        """Return a plain copy of the weights, [experts, outputs, width]."""
        return torch.stack([matrix.dense() for matrix in self.matrices])  # type: ignore[operator]

    def _experts(self) -> ctypes.Array[_Expert]:
        if self._table is None:
            self._table = (_Expert * len(self.matrices))(
                *(self._expert(index) for index in range(len(self.matrices)))
            )
        return self._table

    def _expert(self, index: int) -> _Expert:
        matrix: Any = self.matrices[index]
        weights: NativeWeights = matrix.native()
        products = native_products()
        assert products is not None, "weights were packed for a processor with native code"
        function = ctypes.cast(products.function(weights.form), ctypes.c_void_p)  # type: ignore[arg-type]
        product = Product(
            width=weights.width,
            weights=weights.address,
            outputs=weights.outputs,
            group=weights.group,
            bias=None if self.biases is None else self.biases[index].data_ptr(),
        )
        return _Expert(function.value, product)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out where the weights lie: those of a copy lie elsewhere."""
        return {name: value for name, value in self.__dict__.items() if name != "_table"}

    def _save_to_state_dict(self, *args: object) -> None:
        """Write nothing: the experts write their weights as they were."""


def weighted_sum(numbers: Tensor, weights: Tensor) -> Tensor:
    """Return the sums over neighbours of ``numbers`` [rows · together, width], bf16, each times its
    weight of ``weights`` [rows, together]: [rows, width], bf16, added up in fp32."""
    functions = native_experts()
    assert functions is not None, "there are products by native code alone"
    numbers, factors = numbers.contiguous(), weights.float().contiguous()
    (rows, together), width = factors.shape, numbers.shape[1]
    output = numbers.new_empty(rows, width)
    functions["kvlinker_weighted_sum"](
        _WeightedSum(
            inputs=numbers.data_ptr(),
            weights=factors.data_ptr(),
            rows=rows,
            together=together,
            width=width,
            output=output.data_ptr(),
            threads=torch.get_num_threads(),
        )
    )
    return output


@cache
def native_experts() -> Mapping[str, native.Function] | None:
    """Return the functions of experts.cpp by name, compiled when first asked for; None if there are
    none, and the log says why. Experts' results are compared before they are used."""
    if native_products() is None:
        return None
    names = {"kvlinker_multiply_experts": _Experts, "kvlinker_weighted_sum": _WeightedSum}
    return native.or_fall_back(
        lambda: native.functions("experts.cpp", names),
        "Experts are multiplied by PyTorch's kernels",
    )


class _Expert(ctypes.Structure):
    """A matrix, and what multiplies by it: ``Expert`` of experts.cpp."""

    _fields_ = (("multiply", ctypes.c_void_p), ("product", Product))


class _Experts(ctypes.Structure):
    """Rows and the experts that were chosen for them: ``Experts`` of experts.cpp."""

    _fields_ = (
        ("inputs", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("pairs", ctypes.c_int64),
        ("together", ctypes.c_int64),
        ("chosen", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )


class _WeightedSum(ctypes.Structure):
    """Numbers that are added up: ``WeightedSum`` of experts.cpp."""

    _fields_ = (
        ("inputs", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("together", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )
