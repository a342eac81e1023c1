"""Rotates keys and queries for any position, with the model's own tables and function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvlinker.embedded.model.interception import RotaryFunction


class Rotary:
    """Rotates by one kind of rotary embedding that a model uses; layers that use the same kind share it.

    ``module`` makes cos and sin tables from positions, ``apply`` rotates; ``width`` is the number of leading
    dimensions of a head that ``apply`` is handed (the others carry no position); ``longest`` is the number of positions
    over which the tables do not depend on how many are asked for at once.
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
        self._longest = longest
        self._cos, self._sin = self._make_tables(min(16, longest))
        self._halves = self._is_rotate_half()

    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions [0, length): [length, table_width] each, in the model's dtype."""
        if length > len(self._cos):
            self._cos, self._sin = self._make_tables(max(length, min(2 * len(self._cos), self._longest)))
        return self._cos[:length], self._sin[:length]

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """Write ``heads`` [heads, tokens, head_dim], rotated by cos and sin [tokens, table_width], to ``out``."""
        if self._halves:
            _rotate_halves(heads, cos, sin, out)
        else:
            out.copy_(self._rotate_by_model(heads, cos, sin))

    def _make_tables(self, length: int) -> tuple[Tensor, Tensor]:
        def replaced(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.is_floating_point():
                return value[:1, :1]  # hidden states: only their dtype and device matter
            return torch.arange(length, device=value.device)[None]

        with torch.inference_mode():
            args = [replaced(value) for value in self._args]
            cos, sin = self._module(*args, **{name: replaced(value) for name, value in self._kwargs.items()})
        return cos[0], sin[0]

    def _rotate_by_model(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, passed = heads[None, ..., : self._width], heads[..., self._width :]
        _, turned = self._apply(turned, turned, cos[None], sin[None])
        return torch.cat([turned[0].to(heads.dtype), passed], dim=-1) if passed.shape[-1] else turned[0]

    def _is_rotate_half(self) -> bool:
        """Tell whether ``apply`` pairs dimension i with i + table_width / 2, the layout that has a fast path."""
        generator = torch.Generator().manual_seed(0)
        heads = torch.randn(2, len(self._cos), self._width, generator=generator).to(self._cos)
        if self._cos.shape[-1] > self._width:
            return False
        ours = torch.empty_like(heads)
        _rotate_halves(heads, self._cos, self._sin, ours)
        model = self._rotate_by_model(heads, self._cos, self._sin)
        return torch.allclose(ours.float(), model.float(), rtol=2e-2, atol=2e-2)


def _rotate_halves(heads: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    width = cos.shape[-1]
    half = width // 2
    first, second = heads[..., :half], heads[..., half:width]
    out_first, out_second = out[..., :half], out[..., half:width]
    torch.mul(first, cos[:, :half], out=out_first)
    out_first.addcmul_(second, sin[:, :half], value=-1)
    torch.mul(second, cos[:, half:], out=out_second)
    out_second.addcmul_(first, sin[:, half:])
    if width < heads.shape[-1]:
        out[..., width:] = heads[..., width:]
