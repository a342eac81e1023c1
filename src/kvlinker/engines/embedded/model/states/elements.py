"""Rules under which each element of a state fades by itself: Mamba 1's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvlinker.engines.embedded.model.states.rules import Rule


class SelectiveScan(Rule):
    """Mamba 1's: tokens are the last dimension of the function's arguments. It takes no state
    before the first token, of which what is left is therefore added here."""

    def argument(self, given: Tensor) -> Tensor:
        return given.transpose(1, 2)

    def scan(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        changed: Mapping[str, Tensor],
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        given = {name: part.transpose(1, 2) for name, part in changed.items()}
        output, last = function(**{**arguments, **given, "z": None, self.final: True})
        if state is not None:
            kept = _fading(arguments, given["dt"]) * state[:, 0, :, None]
            output = output + torch.einsum("bdtn,bnt->bdt", kept, given["C"].float())
            last = last + kept[:, :, -1]
        return output.transpose(1, 2), last[:, None].float()

    def returned(
        self, arguments: Mapping[str, Any], output: Tensor, last: Tensor | None
    ) -> tuple[Tensor, Any]:
        output = output.transpose(1, 2)
        if arguments.get("z") is not None:
            output = output * F.silu(arguments["z"])
        return output, None if last is None else last[:, 0]


def _fading(arguments: Mapping[str, Any], dt: Tensor) -> Tensor:
    """Return what is left of each element of a state after each token: [batch, channels, tokens,
    columns]."""
    if arguments.get("delta_bias") is not None:
        dt = dt + arguments["delta_bias"].to(dt.dtype)[..., None]
    if arguments.get("delta_softplus"):
        dt = F.softplus(dt)
    return torch.exp(arguments["A"].float()[:, None] * dt.float().cumsum(-1)[..., None])
