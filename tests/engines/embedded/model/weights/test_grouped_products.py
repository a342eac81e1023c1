"""Weights of GGUF files are multiplied by as PyTorch multiplies by what they mean."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from kvlinker.engines.contract.grouped_codes import (
    BITS,
    Codes,
    GroupedForm,
    Placed,
    grouped_blocks,
    joined,
    offset_of,
    values_of,
)
from kvlinker.engines.embedded.model.weights.native_products import (
    grouped_products,
    rounded_to_bytes,
)
from kvlinker.engines.embedded.model.weights.native_quantized import GroupedMatrix
from tests.engines.native.native_targets import EACH, VNNI_OF_AVX2, passing_for

pytestmark = [
    pytest.mark.skipif(grouped_products() is None, reason="no native products"),
    pytest.mark.usefixtures("target"),
]

GROUPS = {4: 32, 5: 32, 6: 16, 8: 32}
"""The inputs of a group by the bits of codes."""


@pytest.fixture(scope="module", params=[*EACH, *VNNI_OF_AVX2])
def target(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each kind of processor that this one is of."""
    grouped_products.cache_clear()
    with passing_for(request.param):
        assert grouped_products() is not None
        yield
    grouped_products.cache_clear()


def matrix_of(
    form: GroupedForm, outputs: int, groups: int, *, whole: bool = False, group: int = 0
) -> GroupedMatrix:
    """A random weight; a ``whole`` one is of small whole numbers."""
    numbers = np.random.default_rng(outputs + groups)
    group = group or GROUPS[BITS[form]]
    width = groups * group
    codes = numbers.integers(1 << BITS[form], size=(outputs, width), dtype=np.uint8)
    if whole:
        scales = 2.0 ** numbers.integers(-1, 2, (outputs, groups))
        minima = numbers.integers(-9, 10, (outputs, groups))
    else:
        scales, minima = numbers.normal(size=(2, outputs, groups))
    lowest = minima.astype(np.float32) if form.endswith("_min") else None
    blocks = grouped_blocks(Codes(codes, scales.astype(np.float32), lowest), form)
    assert blocks is not None
    place = Placed(form, group, (outputs, width), 0, blocks.numel())
    return GroupedMatrix(blocks.flatten(), [place])


def inputs_of(rows: int, matrix: GroupedMatrix, *, whole: bool = False) -> Tensor:
    """Random inputs; ``whole`` ones stay what they are when they are rounded to bytes."""
    generator = torch.Generator().manual_seed(rows)
    shape = rows, matrix.inputs
    if not whole:
        return torch.randn(*shape, generator=generator).bfloat16()
    numbers = torch.randint(-127, 128, shape, generator=generator).float()
    numbers[:, :: matrix.group] = -127
    return numbers.bfloat16()


@pytest.mark.parametrize("form", BITS)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 33, 145])
@torch.inference_mode()
def test_whole_numbers_are_multiplied_exactly(form: GroupedForm, rows: int) -> None:
    for outputs, groups in ((70, 3), (192, 40), (5, 1)):
        matrix = matrix_of(form, outputs, groups, whole=True)
        inputs = inputs_of(rows, matrix, whole=True)
        exact = inputs.double() @ matrix.dense().double().T
        assert torch.equal(matrix.multiply(inputs, None), exact.float().bfloat16())


@pytest.mark.parametrize("form", BITS)
@given(
    rows=st.integers(1, 60),
    outputs=st.integers(1, 150),
    groups=st.integers(1, 20),
    size=st.sampled_from([1e-20, 1e-3, 1.0, 1e5]),
)
@torch.inference_mode()
def test_products_are_those_of_rounded_inputs(
    form: GroupedForm, rows: int, outputs: int, groups: int, size: float
) -> None:
    matrix = matrix_of(form, outputs, groups)
    inputs = size * inputs_of(rows, matrix)
    met, dense = rounded_to_bytes(inputs, matrix.group), matrix.dense().float().T
    output = matrix.multiply(inputs[None], None)
    assert output.shape == (1, rows, outputs)
    error = (output[0].float() - met @ dense).norm()
    assert error < 4e-3 * (met.abs() @ dense.abs()).norm()  # the dense weight is rounded, too


@pytest.mark.parametrize("form", BITS)
@torch.inference_mode()
def test_a_row_is_the_same_beside_any_others(form: GroupedForm) -> None:
    matrix = matrix_of(form, 200, 8)
    inputs = inputs_of(61, matrix)
    inputs[7] *= 1000
    together = matrix.multiply(inputs, None)
    for row in range(61):
        for count in (1, 4, 13):
            alone = matrix.multiply(inputs[row : row + count], None)
            assert torch.equal(alone[0], together[row])


@torch.inference_mode()
def test_groups_of_sixteen_codes_of_four_bits() -> None:
    """Kinds of two and three bits are such."""
    forms: tuple[GroupedForm, ...] = ("grouped4", "grouped4_min")
    for form in forms:
        matrix = matrix_of(form, 70, 6, whole=True, group=16)
        inputs = inputs_of(9, matrix, whole=True)
        exact = inputs.double() @ matrix.dense().double().T
        assert torch.equal(matrix.multiply(inputs, None), exact.float().bfloat16())


@pytest.mark.parametrize("form", BITS)
@given(
    outputs=st.integers(1, 150),
    groups=st.integers(1, 20),
    chosen=st.lists(st.integers(0, 149), max_size=200),
    neighbours=st.lists(st.tuples(st.integers(0, 149), st.integers(0, 60)), max_size=3),
)
def test_rows_are_what_codes_mean(
    form: GroupedForm,
    outputs: int,
    groups: int,
    chosen: list[int],
    neighbours: list[tuple[int, int]],
) -> None:
    """Neighbouring rows are copied block by block where they fill one."""
    for first, count in neighbours:
        chosen = [*range(first, first + count), *chosen]
    matrix = matrix_of(form, outputs, groups)
    meant = values_of(matrix.blocks, form, outputs).bfloat16()
    assert torch.equal(matrix.dense(), meant)
    rows = torch.tensor([index % outputs for index in chosen], dtype=torch.int64)
    assert torch.equal(matrix.rows(rows), meant[rows])


@torch.inference_mode()
def test_weights_that_are_neighbours_are_one_matrix() -> None:
    one, other = matrix_of("grouped6", 128, 4), matrix_of("grouped6", 70, 4)
    content = torch.cat([one.blocks.flatten(), other.blocks.flatten()])
    middle = one.blocks.numel()
    places = [
        Placed("grouped6", 16, (128, 64), 0, middle),
        Placed("grouped6", 16, (70, 64), middle, len(content)),
    ]
    assert joined(*places)
    assert not joined(*reversed(places))
    assert not joined(places[0]._replace(form="grouped8"), places[1])
    assert not joined(places[0]._replace(shape=(127, 64)), places[1])
    both = GroupedMatrix(content, places)
    inputs = inputs_of(3, both)
    parts = [matrix.multiply(inputs, None) for matrix in (one, other)]
    assert torch.equal(both.multiply(inputs, None), torch.cat(parts, dim=1))
    assert torch.equal(both.dense(), torch.cat([one.dense(), other.dense()]))


def test_the_code_that_means_nothing() -> None:
    assert [offset_of(form) for form in BITS] == [8, 8, 16, 16, 32, 128]
