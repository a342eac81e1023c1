"""Rotary embeddings like those of transformers' models, without a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvlinker.engines.embedded.model.rotary import Rotary

THETA = 10000.0


class Angles(nn.Module):
    """A rotary module: cos and sin of every position times every pair's frequency, times YaRN's
    attention factor."""

    def __init__(self, width: int, *, repeat: str = "halves", factor: float = 1.0) -> None:
        super().__init__()
        self.frequencies = frequencies(width)
        self.repeat = repeat
        self.factor = factor

    def positions(self, position_ids: Tensor) -> Tensor:
        return position_ids.double()

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.positions(position_ids)[..., None] * self.frequencies
        if self.repeat == "halves":
            angles = torch.cat([angles, angles], dim=-1)
        elif self.repeat == "interleaved":
            angles = angles.repeat_interleave(2, dim=-1)
        return (angles.cos() * self.factor).to(hidden.dtype), (angles.sin() * self.factor).to(
            hidden.dtype
        )


def frequencies(width: int) -> Tensor:
    """Every pair's angle per position, fp64."""
    return THETA ** -(torch.arange(0, width, 2).double() / width)


def by_halves(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns dimension i of the tables' width with i + width / 2."""
    width = cos.shape[-1]

    def turned(heads: Tensor) -> Tensor:
        first, second = heads[..., : width // 2], heads[..., width // 2 : width]
        rotated = heads[..., :width] * cos + torch.cat([-second, first], dim=-1) * sin
        return torch.cat([rotated, heads[..., width:]], dim=-1)

    return turned(query), turned(key)


def interleaved(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns dimension 2i of the tables' width with 2i + 1."""
    width = cos.shape[-1]

    def turned(heads: Tensor) -> Tensor:
        crossed = torch.stack([-heads[..., 1:width:2], heads[..., 0:width:2]], dim=-1).flatten(-2)
        return torch.cat([heads[..., :width] * cos + crossed * sin, heads[..., width:]], dim=-1)

    return turned(query), turned(key)


def mirrored(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns dimension i of the tables' width with width - 1 - i: a pairing that only this function
    knows."""
    width = cos.shape[-1]
    order = [*range(width // 2), *range(width - 1, width // 2 - 1, -1)]

    def turned(heads: Tensor) -> Tensor:
        _, rotated = by_halves(heads[..., order], heads[..., order], cos, sin)
        return torch.cat([rotated[..., torch.tensor(order).argsort()], heads[..., width:]], dim=-1)

    return turned(query), turned(key)


FUNCTIONS = {"halves": by_halves, "interleaved": interleaved, None: mirrored}


def toy_rotary(
    head_dim: int = 64,
    width: int | None = None,
    *,
    pairing: str | None = "halves",
    factor: float = 1.0,
) -> Rotary:
    """A rotary embedding over the first ``width`` dimensions, all by default."""
    module = Angles(width or head_dim, repeat=pairing or "halves", factor=factor)
    hidden, positions = torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.long)
    return Rotary(module, (hidden, positions), {}, FUNCTIONS[pairing], width=head_dim, longest=4096)


def rotate_exactly(
    heads: Tensor,
    positions: Tensor,
    width: int,
    *,
    pairing: str | None = "halves",
    factor: float = 1.0,
) -> Tensor:
    """``heads`` [heads, tokens, head_dim] with the rotary embedding of the positions [tokens], in
    fp64."""
    cos, sin = Angles(width, repeat=pairing or "halves", factor=factor)(heads.double(), positions)
    rotated, _ = FUNCTIONS[pairing](heads.double(), heads.double(), cos, sin)
    return rotated
