"""Rotates keys and queries for any position, with the model's own tables and function, in fp32."""

from __future__ import annotations

import threading
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kvlinker.engines.contract.rotary_forms import RotaryFunction

Pairing = Literal["halves", "interleaved"]
"""Which dimensions of a rotated part of w dimensions turn together: i with i + w / 2, or 2i with 2i
+ 1."""

TESTED_POSITIONS = 16
"""Positions over which a model's function is compared with pairings, and its tables with each
other."""


def cos_and_sin(tables: Any) -> tuple[Tensor, Tensor]:
    """Return cos and sin of what a rotary embedding's module makes: the two, or complex numbers."""
    if isinstance(tables, Tensor):
        return tables.real, tables.imag
    return tables[0], tables[1]


class Layout(NamedTuple):
    """A pairing that has a fast path, and the columns of the module's tables that have one angle
    per pair."""

    pairing: Pairing
    columns: slice

    parts_pairs: bool
    """True if the model's function puts the first of all pairs before the second of all."""


class Rotary:
    """Rotates by one kind of rotary embedding that a model uses; layers that use the same kind
    share it.

    ``module`` makes cos and sin tables from positions, ``apply`` rotates; ``width`` is the number
    of leading dimensions of a head that ``apply`` is handed (the others carry no position);
    ``longest`` is the number of positions over which the tables do not depend on how many are asked
    for at once.

    Tables and arithmetic are fp32 whatever the model's dtype: a query is rotated by a distance to a
    segment, and the rounding of both must not add up.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        apply: RotaryFunction,
        *,
        width: int,
        longest: int,
    ) -> None:
        self._module = module
        self._args = args
        self._kwargs = kwargs
        self._apply = apply
        self._width = width
        self.longest = longest
        self._layout = self._find_layout()
        self._growing = threading.Lock()  # chunks are rotated by other threads than the engine's
        self._tables = self._make_tables(torch.arange(min(TESTED_POSITIONS, longest)))

    @property
    def pairing(self) -> Pairing | None:
        """The dimensions that turn together; None if the model's own function alone knows."""
        return None if self._layout is None else self._layout.pairing

    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions [0, length): [length, columns] each, fp32.

        A column belongs to a pair of dimensions where ``pairing`` is known; otherwise the columns
        are the model's own. May be called from any thread.
        """
        cos, sin = self.whole_tables(length)
        return cos[:length], sin[:length]

    def whole_tables(self, length: int) -> tuple[Tensor, Tensor]:
        """Return the same of all positions that are known: [0, length), and maybe some more."""
        if length > len(self._tables[0]):
            with self._growing:
                there = len(self._tables[0])
                if length > there:
                    length_made = max(length, min(2 * there, self.longest))
                    self._tables = self._make_tables(torch.arange(length_made))
        return self._tables

    def model_tables(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions [0, length) as the model's function takes them: [length,
        columns] each, fp32."""
        cos, sin = self.tables(length)
        if self._layout is None or self._layout.columns == slice(None):
            return cos, sin
        if self._layout.columns.step == 2:
            return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of integer ``positions`` [tokens], negative ones too: [tokens,
        columns] each, fp32."""
        distances = positions.abs()
        cos, sin = self.tables(int(distances.max()) + 1)
        return cos[distances], sin[distances] * positions.sign()[:, None]

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """Write ``heads`` [heads, tokens, head_dim], rotated by cos and sin [tokens, columns], to
        ``out``.

        It is computed in fp32 and rounded once, to the dtype of ``out``, which must not share
        memory with ``heads``.
        """
        if self._layout is None:
            out.copy_(self._rotate_by_model(heads.float(), cos, sin))
        else:
            _rotate_pairs(self._layout.pairing, heads, cos, sin, out)

    def rotate_as_model(self, heads: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """Do what ``rotate`` does, with the dimensions in the order in which the model's function
        puts them: for products with what that has rotated."""
        self.rotate(heads, cos, sin, out)
        if self._layout is not None and self._layout.parts_pairs:
            turned = out[..., : 2 * cos.shape[-1]]
            turned.copy_(_apart(turned))

    def shifted(self, heads: Tensor, distance: int) -> Tensor:
        """Return ``heads`` [heads, tokens, head_dim] that are rotated already, rotated further by
        ``distance`` positions. It rounds a second time."""
        if not distance:
            return heads
        cos, sin = self.at(torch.full((heads.shape[1],), distance, device=heads.device))
        factor = self._tables[0][:1]  # it is in ``heads`` already
        out = torch.empty_like(heads, memory_format=torch.contiguous_format)
        self.rotate(heads, cos / factor, sin / factor, out=out)
        return out

    def relative_error(self, length: int) -> float:
        """Return by how much products of rotated queries and keys depend on more than their
        distance, over ``length`` positions, relative to the norms.

        Query and key are near each other, both at once near the start, by tables that were made for
        the start alone, and anywhere, by tables for ``length`` positions. It finds tables that grow
        or squeeze distances, and those that change with the length of the sequence. In fp32, angles
        have errors of up to 6e-8 times ``length``.
        """
        generator = torch.Generator().manual_seed(0)
        near = min(TESTED_POSITIONS, length)
        query_at, key_at = torch.randint(near, (2, 64), generator=generator)
        start = torch.randint(length - near + 1, (64,), generator=generator)
        heads = torch.randn(2, 1, 64, self._width, generator=generator).to(self._tables[0].device)

        def products(start: Tensor, last: int) -> tuple[Tensor, Tensor]:
            rotated = torch.empty_like(heads)
            for index, positions in enumerate((start + query_at, start + key_at)):
                cos, sin = self._make_tables(torch.cat([positions, torch.tensor([last])]))
                self.rotate(heads[index], cos[:-1], sin[:-1], out=rotated[index])
            return rotated.prod(dim=0).sum(-1), rotated.norm(dim=-1).prod(dim=0)

        (there, norms), (here, _) = (
            products(start, length - 1),
            products(torch.zeros_like(start), near - 1),
        )
        return float(((there - here).abs() / norms).max())

    def _make_tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return contiguous cos and sin of the positions: [positions, columns]."""
        cos, sin = self._module_tables(positions)
        if self._layout is not None:
            cos, sin = cos[:, self._layout.columns], sin[:, self._layout.columns]
        return cos.contiguous(), sin.contiguous()

    def _module_tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin as the model's module makes them where the hidden states are fp32."""

        def replaced(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.is_floating_point():
                return value[:1, :1].float()  # hidden states: only their dtype and device matter
            return positions.to(value.device)[None]

        with torch.inference_mode():
            args = [replaced(value) for value in self._args]
            cos, sin = cos_and_sin(
                self._module(
                    *args, **{name: replaced(value) for name, value in self._kwargs.items()}
                )
            )
        return cos[0].float(), sin[0].float()

    def _rotate_by_model(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, passed = heads[None, ..., : self._width], heads[..., self._width :]
        _, turned = self._apply(turned, turned, cos[None], sin[None])
        return torch.cat([turned[0], passed], dim=-1) if passed.shape[-1] else turned[0]

    def _find_layout(self) -> Layout | None:
        """Return the pairing and columns with which ``_rotate_pairs`` does the same as ``apply``,
        if any do.

        Functions that put the first of all pairs before the second of all do the same: products of
        queries and keys do not depend on the order of their dimensions.
        """
        cos, sin = self._module_tables(torch.arange(min(TESTED_POSITIONS, self.longest)))
        generator = torch.Generator().manual_seed(0)
        heads = torch.randn(2, len(cos), self._width, generator=generator).to(cos)
        expected = self._rotate_by_model(heads, cos, sin)
        for columns in (
            slice(cos.shape[-1] // 2),
            slice(0, None, 2),
            slice(None),
        ):  # in halves, repeated, single
            if 2 * cos[:, columns].shape[-1] > self._width:
                continue
            for pairing in ("halves", "interleaved"):
                ours = torch.empty_like(heads)
                _rotate_pairs(pairing, heads, cos[:, columns], sin[:, columns], ours)
                for found, parts_pairs in ((ours, False), (_apart(ours), True)):
                    if torch.allclose(found, expected, rtol=1e-4, atol=1e-4):
                        return Layout(pairing, columns, parts_pairs)
        return None


def _apart(heads: Tensor) -> Tensor:
    """Return the heads with the first of all neighbours before the second of all."""
    return torch.cat([heads[..., ::2], heads[..., 1::2]], dim=-1)


def _rotate_pairs(pairing: Pairing, heads: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    width = 2 * cos.shape[-1]
    if pairing == "halves":
        first, second = slice(width // 2), slice(width // 2, width)
    else:
        first, second = slice(0, width, 2), slice(1, width, 2)
    x, y = heads[..., first].float(), heads[..., second].float()
    out[..., first] = (x * cos).addcmul_(y, sin, value=-1)
    out[..., second] = (y * cos).addcmul_(x, sin)
    if width < heads.shape[-1]:
        out[..., width:] = heads[..., width:]
