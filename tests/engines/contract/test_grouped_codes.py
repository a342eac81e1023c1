"""Codes of GGUF files, in the blocks of native code, mean what ggml says that they mean."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.engines.contract.grouped_codes import (
    BITS,
    BLOCK,
    KINDS,
    block_bytes,
    codes_of,
    grouped_blocks,
    values_of,
)

NUMBERS_AT = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "MXFP4": (),
}
"""Where the numbers in fp16 are in the blocks of a kind; of others only the first is one."""

PRODUCTS = ("_K", "_XS")
"""What the names of kinds end with whose scales are products of two numbers."""


def random_rows(kind: GGMLQuantizationType, rows: int, blocks: int, seed: int) -> Any:
    """Rows as they lie in a file, of any bytes but for the numbers in them."""
    numbers = np.random.default_rng(seed)
    raw = numbers.integers(0, 256, (rows, blocks, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for at in NUMBERS_AT.get(kind.name, (0,)):
        of_blocks = numbers.normal(size=(rows, blocks, 1)).astype(np.float16)
        raw[:, :, at : at + 2] = of_blocks.view(np.uint8)
    if kind.name == "MXFP4":  # a power of two
        raw[:, :, 0] = numbers.integers(115, 131, (rows, blocks))
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@given(rows=st.integers(1, 140), blocks=st.integers(1, 3), seed=st.integers(0, 1 << 20))
def test_what_codes_mean(kind: GGMLQuantizationType, rows: int, blocks: int, seed: int) -> None:
    raw = random_rows(kind, rows, blocks, seed)
    form, group, _ = KINDS[kind]
    found = codes_of(raw, kind)
    inputs = blocks * GGML_QUANT_SIZES[kind][0]
    assert found.codes.shape == (rows, inputs)
    assert found.scales.shape == (rows, inputs // group)
    assert found.codes.max() < 1 << BITS[form]
    laid = grouped_blocks(found, form)
    assert laid is not None
    assert laid[0].numel() == block_bytes(kind, inputs)
    assert len(laid) == -(-rows // BLOCK)
    meant = torch.from_numpy(gguf.dequantize(raw, kind))
    if kind.name.endswith(PRODUCTS):
        largest = meant.abs().view(rows, -1, group).amax(dim=2, keepdim=True)
        error = (values_of(laid, form, rows) - meant).view(rows, -1, group).abs()
        minima = 0.0 if found.minima is None else torch.from_numpy(found.minima)[..., None].abs()
        assert (error <= 2**-11 * (largest + 2 * minima) + 1e-6).all()  # of fp16
    else:
        assert torch.equal(values_of(laid, form, rows), meant)


@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_numbers_that_are_none(number: float) -> None:
    raw = random_rows(GGMLQuantizationType.Q8_0, 3, 2, seed=0)
    raw[1, :2] = np.array([number], np.float16).view(np.uint8)
    assert grouped_blocks(codes_of(raw, GGMLQuantizationType.Q8_0), "grouped8") is None
