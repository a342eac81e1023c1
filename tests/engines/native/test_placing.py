"""Native placing writes what PyTorch would: rotated, in its slots, as the cache lays it out."""

import pytest
import torch

from kvlinker.engines.contract.placing import Rotation, Rounding
from kvlinker.engines.native.placing import NativePlacing
from tests.engines.native.native_targets import EACH, passing_for

HEADS, LAYERS, BLOCKS, BLOCK_SIZE = 2, 2, 5, 32
PAIRS, KEY_DIM, VALUE_DIM = 20, 45, 64
GARBAGE = 7.0
ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 8e-3}

pytestmark = pytest.mark.skipif(not EACH, reason="native code is for CPUs with AVX2 or NEON")


def rows(dim, dtype):
    """A cache in which a token's numbers lie beside each other."""
    return torch.full((BLOCKS, BLOCK_SIZE, HEADS, dim), GARBAGE, dtype=dtype)


def columns(dim, dtype):
    """A cache in which a block's slots do, as in vLLM's keys on CPUs."""
    return torch.full((BLOCKS, HEADS, dim, BLOCK_SIZE), GARBAGE, dtype=dtype).permute(0, 3, 1, 2)


def scene(dtype):
    """A long part across blocks, which begins within a block, and scattered tokens of another."""
    parts = [
        [
            (torch.randn(HEADS, n, KEY_DIM).to(dtype), torch.randn(HEADS, n, VALUE_DIM).to(dtype))
            for n in (90, 9)
        ]
        for _ in range(LAYERS)
    ]
    numbers = torch.tensor([0] * 87 + [1] * 4)
    taken = torch.cat([torch.arange(3, 90), torch.tensor([8, 2, 3, 5])])
    slots = torch.cat([torch.arange(41, 41 + 87), torch.tensor([0, 1, 5, 159])])
    positions = torch.cat([torch.arange(100, 187), torch.tensor([0, 1, 199, 3])])
    return parts, torch.stack([numbers, taken, positions, slots])


def rotation(dtype, *, interleaved):
    angles = torch.arange(200)[:, None] / (1 + torch.arange(PAIRS))
    cos, sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype).chunk(2, dim=1)
    return Rotation(cos, sin, interleaved)


def rotated(key, positions, tables):
    """Keys [heads, tokens, dim] as products of complex numbers, rounded once."""
    turning = torch.complex(tables.cos[positions].float(), tables.sin[positions].float())
    shape = (PAIRS, 2) if tables.interleaved else (2, PAIRS)
    pairs = key[..., : 2 * PAIRS].float().unflatten(-1, shape)
    pairs = pairs if tables.interleaved else pairs.transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turning)
    turned = turned if tables.interleaved else turned.transpose(-1, -2)
    return torch.cat([turned.flatten(-2).to(key.dtype), key[..., 2 * PAIRS :]], dim=-1)


def check(layouts, turns, dtype):
    """Compare what native code places with what PyTorch does."""
    parts, tokens = scene(dtype)
    tables = None if turns is None else rotation(dtype, interleaved=turns == "pairs")
    caches = [
        tuple(made(dim, dtype) for made, dim in zip(layouts, (KEY_DIM, VALUE_DIM), strict=True))
        for _ in range(LAYERS)
    ]
    NativePlacing().place(parts, caches, tokens, tables)
    numbers, taken, positions, slots = tokens
    others = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    others[slots] = False
    for layer, cache in zip(parts, caches, strict=True):
        for which, placed in enumerate(cache):
            given = torch.stack(
                [layer[part][which][:, row] for part, row in zip(numbers, taken, strict=True)],
                dim=1,
            )
            if which == 0 and tables is not None:
                given = rotated(given, positions, tables)
            found = placed.flatten(0, 1)
            tolerance = 0.0 if which == 1 or tables is None else ROUNDED[dtype]
            torch.testing.assert_close(
                found[slots].transpose(0, 1), given, rtol=tolerance, atol=tolerance / 10
            )
            assert (found[others] == GARBAGE).all()


@pytest.mark.parametrize("target", EACH)
@pytest.mark.parametrize("layouts", [(rows, rows), (columns, rows), (rows, columns)])
@pytest.mark.parametrize("turns", ["pairs", "halves", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_are_placed_as_pytorch_places_them(target, layouts, turns, dtype):
    with passing_for(target):
        check(layouts, turns, dtype)


def test_what_is_not_placed_as_it_is_is_refused():
    parts, tokens = scene(torch.float32)
    caches = [(rows(KEY_DIM, torch.float32), rows(VALUE_DIM, torch.float32))] * LAYERS
    tables = rotation(torch.float32, interleaved=False)
    placing = NativePlacing()
    one = torch.tensor(1.0)
    rounding = Rounding(torch.float8_e4m3fn, [(one, one)] * LAYERS)
    with pytest.raises(LookupError, match="as they are"):
        placing.place(parts, caches, tokens, tables, rounding=rounding)
    sparse = [(key[:, ::2, :, ::2], value) for key, value in caches]
    with pytest.raises(LookupError, match="as they are"):
        placing.place(parts, sparse, tokens, tables)
    with pytest.raises(LookupError, match=r"in torch\.float32"):
        placing.place(parts, caches, tokens, rotation(torch.bfloat16, interleaved=False))
