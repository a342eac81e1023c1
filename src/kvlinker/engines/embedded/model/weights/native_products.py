"""Products with weights by ``native/products.cpp``, in bf16, 8 and 4 bits, with plain ones by
``native/plain_products.cpp``, and with those of GGUF files by ``native/grouped_products.cpp``, on
CPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from kvlinker.engines import native
from kvlinker.engines.contract.grouped_codes import (
    BITS,
    BLOCK,
    Codes,
    GroupedForm,
    grouped_blocks,
    inputs_of_step,
    values_of,
)
from kvlinker.engines.embedded.model.weights.blocks import bf16_blocks, code_blocks

Form = Literal["plain", "bf16", "int8", "int8_int8", "int4"] | GroupedForm
"""Names the form in which weights are stored: ``plain`` is as PyTorch has them, in bf16. By those
in 8 bits, inputs of 16 bits are multiplied, or in ``int8_int8`` ones that are rounded to 8."""

Files = Mapping[str, Sequence[Form]]
"""The files that multiply by weights in these forms."""

FILES: Files = {
    "plain_products.cpp": ("plain",),
    "products.cpp": ("bf16", "int8", "int8_int8", "int4"),
}
GROUPED_FILES: Files = {"grouped_products.cpp": tuple(BITS)}

Case = tuple[Tensor, Tensor, int]
"""A weight in blocks, the same as it is, [outputs, inputs], and the inputs that share scales."""

ROUNDING: Collection[Form] = ("int8_int8", "int4", *BITS)
"""The forms in which inputs are rounded to 8 bits."""

CHECKED_ROWS = (5, 100)
"""The numbers of rows that are checked: weights are widened otherwise for few than for many."""

BYTE_LIMIT = 127
"""The largest magnitude of an input that is rounded to 8 bits."""


def rounded_to_bytes(inputs: Tensor, group: int) -> Tensor:
    """Return ``inputs`` [rows, width] as native code rounds them where it multiplies by codes:
    fp32. Of each ``group`` of neighbours in a row, of which the last may be smaller, the one of the
    largest magnitude becomes 127."""
    rows, width = inputs.shape
    groups = nn.functional.pad(inputs.float(), (0, -width % group)).view(rows, -1, group)
    most = groups.abs().amax(dim=2, keepdim=True)
    codes = (groups * (BYTE_LIMIT / most).nan_to_num(posinf=0.0)).round()
    return (codes * (most / BYTE_LIMIT)).view(rows, -1)[:, :width]


class NativeProducts:
    """Multiplies rows by a matrix of weights that are plain, or in the blocks of
    ``kvlinker.engines.embedded.model.weights.blocks``."""

    def __init__(self, files: Files, cases: Mapping[Form, Case]) -> None:
        """Load the functions of ``files``, and compare them with PyTorch by ``cases``. Raises
        NativeUnavailableError."""
        self._functions: dict[Form, native.Function] = {}
        for file, forms in files.items():
            names = {form: f"kvlinker_multiply_{form}" for form in forms}
            found = native.functions(file, dict.fromkeys(names.values(), Product))
            self._functions |= {form: found[name] for form, name in names.items()}
        self._check(cases)

    def multiply(
        self,
        form: Form,
        inputs: Tensor,
        weights: int,
        outputs: int,
        *,
        group: int,
        bias: Tensor | None,
    ) -> Tensor:
        """Return ``inputs`` [..., width], bf16, times the weights, plus ``bias`` [outputs]: [...,
        outputs], bf16.

        ``weights`` is the address of the weights, and ``group`` the number of neighbouring inputs
        that share scales; the last ones may be fewer. Sums are fp32.
        """
        inputs = inputs.contiguous()
        assert inputs.dtype == torch.bfloat16, inputs.dtype
        assert bias is None or (bias.dtype == torch.bfloat16 and bias.is_contiguous()), bias
        width = inputs.shape[-1]
        output = torch.empty((*inputs.shape[:-1], outputs), dtype=torch.bfloat16)
        product = Product(
            inputs=inputs.data_ptr(),
            rows=inputs.numel() // width,
            width=width,
            weights=weights,
            outputs=outputs,
            group=group,
            bias=None if bias is None else bias.data_ptr(),
            output=output.data_ptr(),
            threads=torch.get_num_threads(),
        )
        self._functions[form](product)
        return output

    def function(self, form: Form) -> native.Function:
        """Return the function that multiplies by weights in this form: it takes a ``Product``."""
        return self._functions[form]

    def _check(self, cases: Mapping[Form, Case]) -> None:
        """Compare each form with PyTorch. Raises NativeUnavailableError if they differ."""
        bias = _random(CHECKED_OUTPUTS)
        for form, (blocks, dense, shared) in cases.items():
            for rows in CHECKED_ROWS:
                inputs = _random(rows, CHECKED_WIDTH)
                ours = self.multiply(
                    form, inputs, blocks.data_ptr(), CHECKED_OUTPUTS, group=shared, bias=bias
                )
                met = rounded_to_bytes(inputs, shared) if form in ROUNDING else inputs.float()
                expected = met @ dense[:CHECKED_OUTPUTS].float().T + bias.float()
                native.require_close(ours, expected, f"the product with weights in {form}")


class GroupedProducts(NativeProducts):
    """Multiplies by weights of GGUF files, and returns rows of them."""

    def __init__(self) -> None:
        """Load the functions, and compare them with PyTorch. Raises NativeUnavailableError."""
        self._rows: dict[Form, native.Function] = {}
        for file, forms in GROUPED_FILES.items():
            names = {form: f"kvlinker_rows_{form}" for form in forms}
            found = native.functions(file, dict.fromkeys(names.values(), WeightRows))
            self._rows |= {form: found[name] for form, name in names.items()}
        super().__init__(GROUPED_FILES, _grouped_cases())

    def rows(self, form: Form, chosen: Tensor, weights: int, *, width: int, group: int) -> Tensor:
        """Return the ``chosen`` rows [rows] of a weight at the address ``weights``: [rows, width],
        bf16."""
        chosen = chosen.contiguous()
        assert chosen.dtype == torch.int64, chosen.dtype
        output = torch.empty((len(chosen), width), dtype=torch.bfloat16)
        rows = WeightRows(
            chosen=chosen.data_ptr(),
            rows=len(chosen),
            width=width,
            weights=weights,
            group=group,
            output=output.data_ptr(),
            threads=torch.get_num_threads(),
        )
        self._rows[form](rows)
        return output

    def rows_function(self, form: Form) -> native.Function:
        """Return the function that copies rows of weights in this form: it takes ``WeightRows``."""
        return self._rows[form]

    def _check(self, cases: Mapping[Form, Case]) -> None:
        super()._check(cases)
        for form, (blocks, dense, shared) in cases.items():
            chosen = torch.arange(CHECKED_OUTPUTS)
            ours = self.rows(form, chosen, blocks.data_ptr(), width=CHECKED_WIDTH, group=shared)
            native.require_close(ours, dense, f"reading weights in {form}")


CHECKED_OUTPUTS, CHECKED_WIDTH, CHECKED_GROUP = BLOCK + 6, 96, 32
"""The shape of the weights that are checked: two blocks, of which the last one is not full."""


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def _cases() -> dict[Form, Case]:
    """Return weights in the forms that kvlinker makes itself."""
    generator = torch.Generator().manual_seed(0)
    width, group = CHECKED_WIDTH, CHECKED_GROUP
    weight = _random(CHECKED_OUTPUTS, width)
    codes = torch.randint(16, (2 * BLOCK, width), generator=generator, dtype=torch.int32)
    signed = torch.randint(-127, 128, (2 * BLOCK, width), generator=generator, dtype=torch.int32)
    scales, grids = (
        _random(2, 1, BLOCK),
        _random(2, width // group, 2, BLOCK),
    )  # a grid: scale, what code 8 means
    scale, middle = (
        part.transpose(1, 2).repeat_interleave(group, 2).flatten(0, 1) for part in grids.unbind(2)
    )
    bytes_blocks = code_blocks(scales, signed + 128, 8)
    bytes_dense = signed * scales.view(-1, 1)
    return {
        "plain": (weight, weight, width),
        "bf16": (bf16_blocks(weight), weight, width),
        "int8": (bytes_blocks, bytes_dense, width),
        "int8_int8": (bytes_blocks, bytes_dense, 2 * group),
        "int4": (code_blocks(grids.flatten(2), codes, 4), (codes - 8) * scale + middle, group),
    }


def _grouped_cases() -> dict[Form, Case]:
    """Return weights in the forms of GGUF files."""
    numbers = np.random.default_rng(0)
    cases: dict[Form, Case] = {}
    for form, bits in BITS.items():
        group = min(CHECKED_GROUP, max(16, inputs_of_step(bits)))
        shape = CHECKED_OUTPUTS, CHECKED_WIDTH // group
        scales, minima = numbers.normal(size=(2, *shape)).astype(np.float32)
        codes = numbers.integers(1 << bits, size=(CHECKED_OUTPUTS, CHECKED_WIDTH), dtype=np.uint8)
        rows = Codes(codes, scales, minima if form.endswith("_min") else None)
        blocks = grouped_blocks(rows, form)
        assert blocks is not None
        cases[form] = (blocks, values_of(blocks, form, CHECKED_OUTPUTS), group)
    return cases


def load_products() -> NativeProducts:
    """Compile and check the products with weights in kvlinker's own forms. Raises
    NativeUnavailableError."""
    return NativeProducts(FILES, _cases())


@cache
def native_products() -> NativeProducts | None:
    """Return the native products, compiled when first asked for; None if there are none, and the
    log says why."""
    return native.or_fall_back(load_products, "Weights are multiplied by PyTorch's kernels")


@cache
def grouped_products() -> GroupedProducts | None:
    """Return the native products with weights of GGUF files, compiled when first asked for; None
    if there are none, and the log says why."""
    return native.or_fall_back(
        GroupedProducts, "Weights of GGUF files are multiplied by in bfloat16"
    )


def products_of(form: Form) -> NativeProducts:
    """Return the native products with weights in this form, which are there."""
    products = grouped_products() if form in BITS else native_products()
    assert products is not None, "weights were packed for a processor with native code"
    return products


class Product(ctypes.Structure):
    """Describes the product of rows and a matrix: ``Product`` of product.h."""

    _fields_ = (
        ("inputs", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )


class WeightRows(ctypes.Structure):
    """Describes some rows of a weight: ``WeightRows`` of grouped_products.cpp."""

    _fields_ = (
        ("chosen", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("group", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )
