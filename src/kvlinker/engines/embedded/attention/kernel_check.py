"""Compares an attention kernel of our own with PyTorch's on a small case, before it is used."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from kvlinker.engines import native
from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.contract.rotary_forms import RotaryFunction
from kvlinker.engines.embedded.attention.kernel import AttentionKernel, View
from kvlinker.engines.embedded.attention.native_kernel import NativeAttention, NativePlan
from kvlinker.engines.embedded.attention.position_scores import PositionScores
from kvlinker.engines.embedded.attention.torch_kernels import TorchAttention
from kvlinker.engines.embedded.model.rotary import Rotary

HEAD_DIM = 64

ROTATED = 40
"""The dimensions of a head that are rotated: not a multiple of the vectors' 16 pairs, and not
all."""


def require_right(kernel: AttentionKernel, dtype: torch.dtype, device: torch.device) -> None:
    """Compare attention, and the writing of new keys and values, with PyTorch's, with and without
    rotary embedding, on the device.

    Raises NativeUnavailableError if they differ.
    """
    generator = torch.Generator().manual_seed(0)
    positions = np.concatenate(
        [np.arange(3, 160, 7), np.arange(170, 211), [180], np.arange(150, 155)]
    )
    alone, other, third = slice(0, 64), slice(64, 65), slice(65, 70)
    hidden = np.arange(130) % 9 == 4
    views = [View(0, alone, 0, 0, 0, 130, hidden), View(1, alone, 130, 130, 0, 81)]
    views += [
        View(0, other, 20, 20, 5, 130),
        View(0, third, 30, 30, 0, 130, hidden),
        View(1, third, 70, 70, 3, 81),
    ]

    def random(heads: int, rows: int) -> Tensor:
        return torch.randn(heads, rows, HEAD_DIM, generator=generator).to(device, dtype)

    query, segments = (
        random(6, len(positions)),
        [(random(2, rows), random(2, rows)) for rows in (130, 81)],
    )
    new, slots = (
        (random(2, len(positions)), random(2, len(positions))),
        torch.arange(len(positions), device=device).flip(0),
    )

    def computed(by: AttentionKernel, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        output = query.new_empty(len(positions), 6, HEAD_DIM)
        plan = by.plan(views, positions)
        pool = new[0].new_empty(new[0].shape), new[1].new_empty(new[1].shape)
        by.write(plan, *new, slots, rotary, pool)
        by.attend(
            plan, query, segments, rotary, AttentionOptions(scale=HEAD_DIM**-0.5), output=output
        )
        return output, *pool

    for rotary in (None, _rotary(_turn_halves, device), _rotary(_turn_neighbours, device)):
        ours, expected = computed(kernel, rotary), computed(TorchAttention(), rotary)
        for what, mine, theirs in zip(
            ("attention", "writing keys", "writing values"), ours, expected, strict=True
        ):
            native.require_close(mine, theirs, what)


def require_right_weights(kernel: NativeAttention) -> None:
    """Compare the weights that observers see with PyTorch's. Raises NativeUnavailableError if they
    differ."""
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, rows: int) -> Tensor:
        return torch.randn(heads, rows, HEAD_DIM, generator=generator).bfloat16()

    positions, rows = np.arange(150, 211), slice(0, 61)
    hidden = np.arange(130) % 9 == 4
    views = [View(0, rows, 0, 0, 0, 130, hidden), View(1, rows, 130, 130, 0, 81)]
    query = random(6, len(positions))
    segments = [(random(2, rows), random(2, rows)) for rows in (130, 81)]
    options = AttentionOptions(scale=HEAD_DIM**-0.5)
    expected = PositionScores(views, positions, None, None, 211, native=False)
    native.require_close(
        kernel.mean_weights(NativePlan.of(views, positions), query, segments, None, options),
        expected.weights(query, segments, options).mean(0),
        "the weighing of keys",
    )


class _Angles(nn.Module):
    """Makes cos and sin of one angle per pair of dimensions and position, as a model's rotary
    module does."""

    def forward(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None] / torch.arange(1, ROTATED // 2 + 1, device=positions.device)
        return angles.cos(), angles.sin()


def _turn_neighbours(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate dimensions 2i and 2i + 1 together."""

    def turned(heads: Tensor) -> Tensor:
        pairs = torch.view_as_complex(heads.reshape(*heads.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)

    return turned(query), turned(key)


def _turn_halves(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate dimension i together with the one that lies half of them behind."""

    def turned(heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    return turned(query), turned(key)


def _rotary(apply: RotaryFunction, device: torch.device) -> Rotary:
    hidden = torch.zeros(1, 1, 1, device=device)
    positions = torch.zeros(1, 1, dtype=torch.long, device=device)
    return Rotary(_Angles(), (hidden, positions), {}, apply, width=ROTATED, longest=256)
