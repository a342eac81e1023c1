import threading

import pytest
import torch

from kvlinker.engines.embedded.model.discovery import anatomy_of
from kvlinker.engines.embedded.model.loaded import RotatedKeys
from kvlinker.engines.embedded.model.rotary import Rotary
from kvlinker.store import LayerKV
from tests.engines.embedded.toy_rotary import (
    FUNCTIONS,
    Angles,
    by_halves,
    rotate_exactly,
    toy_rotary,
)
from tests.toy_models import FAMILIES, tiny_model

LAYOUTS = [
    {"pairing": "halves"},
    {"pairing": "interleaved"},
    {"pairing": None},
    {"pairing": "halves", "width": 20},
    {"pairing": "interleaved", "width": 20, "factor": 1.37},
    {"pairing": None, "width": 20},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_position_is_rotated_and_rounded_once(layout, dtype):
    rotary = toy_rotary(32, **layout)
    assert rotary.pairing == layout["pairing"]
    positions = torch.tensor([0, 1, -1, 700, -700, 3])
    heads = torch.randn(3, 6, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    rotated = torch.empty_like(heads)
    rotary.rotate(heads, *rotary.at(positions), out=rotated)
    exact = rotate_exactly(heads, positions, **{"width": 32} | layout)
    assert torch.allclose(
        rotated.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=3e-4
    )
    assert (rotated.double() - exact).norm() <= (
        2e-3 if dtype == torch.bfloat16 else 1e-5
    ) * exact.norm()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tables_are_given_as_the_models_function_takes_them(layout):
    rotary = toy_rotary(32, **layout)
    repeat, width = layout["pairing"] or "halves", layout.get("width", 32)
    module = Angles(width, repeat=repeat, factor=layout.get("factor", 1.0))
    expected = module(torch.zeros(1), torch.arange(21))
    for found, own in zip(rotary.model_tables(21), expected, strict=True):
        torch.testing.assert_close(found, own)


def test_heads_may_be_rotated_into_a_part_of_a_pool():
    rotary, heads = (
        toy_rotary(32),
        torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0)),
    )
    pool = torch.zeros(2, 9, 32)
    rotary.rotate(heads, *rotary.at(torch.arange(5)), out=pool[:, 2:7])
    alone = torch.empty_like(heads)
    rotary.rotate(heads, *rotary.at(torch.arange(5)), out=alone)
    assert torch.equal(pool[:, 2:7], alone)
    assert (pool[:, :2] == 0).all()
    assert (pool[:, 7:] == 0).all()


@pytest.mark.parametrize("repeat", ["halves", "interleaved", "single"])
@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
def test_tables_have_one_column_per_pair_however_the_model_repeats_them(repeat, pairing):
    def apply(query, key, cos, sin):
        if repeat == "interleaved":
            cos, sin = cos[..., ::2], sin[..., ::2]
        elif repeat == "halves":
            cos, sin = cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
        if pairing == "interleaved":
            cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        else:
            cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        return FUNCTIONS[pairing](query, key, cos, sin)

    hidden, positions = torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.long)
    rotary = Rotary(Angles(16, repeat=repeat), (hidden, positions), {}, apply, width=16, longest=64)
    assert rotary.pairing == pairing
    assert rotary.tables(7)[0].shape == (7, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_models_tables_are_fp32_and_their_pairing_is_found(family, dtype):
    layers = anatomy_of(tiny_model(family).to(dtype)).layers
    for rotary in {layer.rotary for layer in layers if layer.rotary is not None}:
        assert rotary.pairing == ("interleaved" if "interleaved" in family else "halves")
        assert {table.dtype for table in rotary.tables(40)} == {torch.float32}
        assert len(rotary.tables(40)[0]) == 40


@pytest.mark.parametrize("family", FAMILIES)
def test_models_rotate_by_differences_alone_within_their_window(family):
    for layer in anatomy_of(tiny_model(family)).layers:
        if layer.rotary is not None:
            assert layer.rotary.relative_error(256) < 1e-5


@pytest.mark.parametrize("family", ["dynamic-rope", "longrope"])
def test_tables_that_change_with_the_length_are_found_out(family):
    rotary = anatomy_of(tiny_model(family)).layers[0].rotary
    assert rotary is not None
    assert rotary.relative_error(1000) > 1e-2


class Growing(Angles):
    """Keys become larger with their position."""

    def forward(self, hidden, position_ids):
        grown = 1 + position_ids[..., None] / 10_000
        return tuple(table * grown for table in super().forward(hidden, position_ids))


class Squeezed(Angles):
    """From position 500 on, four positions count as one."""

    def positions(self, position_ids):
        return torch.where(
            position_ids < 500, position_ids, 500 + (position_ids - 500) // 4
        ).double()


@pytest.mark.parametrize("module", [Growing(16), Squeezed(16)], ids=["growing", "squeezed"])
def test_tables_that_depend_on_more_than_differences_are_found_out(module):
    hidden, positions = torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.long)
    rotary = Rotary(module, (hidden, positions), {}, by_halves, width=16, longest=2000)
    assert rotary.relative_error(2000) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_resident_form_is_undone(family):
    layers = anatomy_of(tiny_model(family)).layers
    form = RotatedKeys(layers)
    generator = torch.Generator().manual_seed(1)
    for index, shape in enumerate(layers):
        kv = LayerKV(
            torch.randn(shape.kv_heads, 40, shape.key_dim, generator=generator),
            torch.randn(shape.kv_heads, 40, shape.value_dim, generator=generator),
        )
        resident = form.resident(index, kv)
        if shape.latents is None:
            assert resident.value is kv.value
            assert (resident.key is kv.key) == (shape.rotary is None)
        else:
            assert torch.equal(resident.value, kv.value)
            assert resident.joined.data_ptr() == resident.key.data_ptr()
        torch.testing.assert_close(form.computed(index, resident).key, kv.key, atol=1e-5, rtol=1e-5)
        if shape.rotary is not None:
            assert (resident.key[:, 1:] - kv.key[:, 1:]).abs().max() > 0.1


def test_tables_that_several_threads_need_grow_once_and_never_shrink():
    """Loader threads rotate chunks beside the engine's thread; cos of one table with sin of another
    is no rotation."""
    making, go = threading.Event(), threading.Event()
    lengths = []

    class Slow(Angles):
        def forward(self, hidden, positions):
            if positions.shape[1] > 16:
                lengths.append(positions.shape[1])
                if not making.is_set():
                    making.set()
                    assert go.wait(20)
            return super().forward(hidden, positions)

    hidden, positions = torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.long)
    rotary = Rotary(Slow(16), (hidden, positions), {}, FUNCTIONS["halves"], width=16, longest=16)
    first = threading.Thread(target=rotary.tables, args=(40,))
    second = threading.Thread(target=rotary.tables, args=(80,))
    first.start()
    assert making.wait(20)
    second.start()
    second.join(0.2)  # it waits for the first, or makes tables that the first would overwrite
    go.set()
    first.join()
    second.join()
    assert [len(table) for table in rotary.tables(80)] == [80, 80]
    assert lengths == [40, 80]
