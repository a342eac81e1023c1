"""The placing kernel, interpreted, writes what PyTorch would: rotated, rounded, in its slots."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvlinker.engines.contract.placing import Rotation, Rounding
from kvlinker.engines.gpu.launching import FP8_FORMS, place_kv
from tests.engines.gpu.interpreting import computes_in_bfloat16

HEADS, BLOCKS, BLOCK_SIZE, LAYERS = 2, 6, 16, 2
SIZES = {"key_dim": 16, "value_dim": 24, "width": 12}
EXTREMES = [0.0, -0.0, 1e-12, -1e-12, 2.0**-9, 3 * 2.0**-10, 0.017, 464.0, -1e9, 3e38]


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch):
    computes_in_bfloat16(monkeypatch)


def scene(dtype: torch.dtype, *, interleaved: bool, largest: float) -> Any:
    """Parts of chunks of all layers, their tokens' places, and tables of angles."""
    generator = torch.Generator().manual_seed(0)
    parts = [
        [
            tuple(
                (torch.randn(HEADS, rows, dim, generator=generator) * largest).to(dtype)
                for dim in (SIZES["key_dim"], SIZES["value_dim"])
            )
            for rows in (40, 9)
        ]
        for _ in range(LAYERS)
    ]
    for layer in parts:
        layer[0][1][0, 0, : len(EXTREMES)] = torch.tensor(EXTREMES).to(dtype)
    numbers, rows = np.repeat([0, 1], [40, 9]), np.concatenate([np.arange(40), np.arange(9)])
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:49]
    positions = torch.arange(49) * 3 - 5
    known = torch.from_numpy(np.stack([numbers, rows]))
    tokens = torch.cat([known, torch.stack([positions, slots])])
    angles = torch.arange(200)[:, None] / (1 + torch.arange(SIZES["width"] // 2))
    return parts, tokens, Rotation(angles.cos(), angles.sin(), interleaved)


def rotated(key: torch.Tensor, positions: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Keys [heads, tokens, dim] at these positions, rounded once."""
    width = SIZES["width"]
    c = rotation.cos[positions.abs()]
    s = rotation.sin[positions.abs()] * positions.sign()[:, None]
    turned, result = key[..., :width].float(), key.clone()
    x_dims = slice(0, width, 2) if rotation.interleaved else slice(0, width // 2)
    y_dims = slice(1, width, 2) if rotation.interleaved else slice(width // 2, width)
    x, y = turned[..., x_dims], turned[..., y_dims]
    result[..., :width][..., x_dims] = (x * c - y * s).to(key.dtype)
    result[..., :width][..., y_dims] = (y * c + x * s).to(key.dtype)
    return result


def rounded(values: torch.Tensor, scale: torch.Tensor, form: torch.dtype) -> torch.Tensor:
    """As vLLM's update does: no larger than the largest number."""
    most = torch.finfo(form).max
    return (values.float() / scale).clamp(-most, most).to(form).view(torch.uint8)


@pytest.mark.parametrize("programs", [None, 5])
@pytest.mark.parametrize("form", [None, *FP8_FORMS], ids=str)
@pytest.mark.parametrize(
    ("dtype", "interleaved"),
    [(torch.float32, True), (torch.float16, False), (torch.bfloat16, False)],
    ids=str,
)
def test_tokens_are_placed_as_pytorch_places_them(dtype, interleaved, form, programs):
    """To the bit in fp8, but for keys' last bits in fp32."""
    parts, tokens, rotation = scene(dtype, interleaved=interleaved, largest=3.0)
    kept = dtype if form is None else torch.uint8
    caches: list[Any] = [
        tuple(
            torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, SIZES[dim], dtype=kept)
            for dim in ("key_dim", "value_dim")
        )
        for _ in range(LAYERS)
    ]
    scales = [(torch.tensor(0.02 * (1 + n)), torch.tensor(1.0 + n)) for n in range(LAYERS)]
    rounding = None if form is None else Rounding(form, scales)
    place_kv(parts, caches, tokens, rotation, rounding=rounding, programs=programs)
    _, _, positions, slots = tokens
    for layer, cache, scale in zip(parts, caches, scales, strict=True):
        key, value = (torch.cat([part[n] for part in layer], dim=1) for n in (0, 1))
        expected = rotated(key, positions, rotation), value
        for ours, theirs, by in zip(cache, expected, scale, strict=True):
            placed = ours[slots // BLOCK_SIZE, slots % BLOCK_SIZE].transpose(0, 1)
            if form is None:
                torch.testing.assert_close(placed, theirs)
                continue
            bits = rounded(theirs, by, form)
            differ = (placed != bits).float().mean()
            assert differ == 0 if theirs is value else differ < 0.001
            found, wanted = (each.contiguous().view(form).float() for each in (placed, bits))
            torch.testing.assert_close(found, wanted, rtol=0.26, atol=1e-6)
        others = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
        others[slots] = False
        assert not cache[1].flatten(0, 1)[others].any()
