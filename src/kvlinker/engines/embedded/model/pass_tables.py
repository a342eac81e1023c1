"""The tables of a model that makes them inside its layers, with no module for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvlinker.engines.contract.rotary_forms import RotaryForm
from kvlinker.engines.embedded.model.interception import Interceptor, intercepted
from kvlinker.engines.embedded.model.precision import in_fp32


class PassTables(nn.Module):
    """Gives cos and sin of all positions of a model's context, read from one pass that ends where
    it first rotates."""

    def __init__(self, model: Any, window: int) -> None:
        super().__init__()
        device = model.device
        positions = torch.arange(window, device=device)[None]
        try:
            with in_fp32(model), intercepted(_Reader()), torch.inference_mode():
                model(
                    input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False
                )
        except _Read as read:
            self._cos, self._sin = read.cos[0], read.sin[0]

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [1, tokens, columns] of ``positions`` [1, tokens]."""
        return self._cos[positions], self._sin[positions]


class _Read(Exception):  # noqa: N818
    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin


class _Reader(Interceptor):
    """Ends a pass at its first rotation."""

    def rotary(self, form: RotaryForm, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        _, _, cos, sin = form.rotation(args, kwargs)
        raise _Read(cos.clone(), sin.clone())
