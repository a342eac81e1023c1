"""Rules whose states are numbers under a scale, of which the logarithm is kept: RWKV's, and the
xLSTM's matrix memory.

The last column of such a state is the logarithm of what all others in its row are multiplied by:
the largest that was met, so that nothing overflows. A state is affine in the one before as any
other: it fades by a factor, and what is written is added to it, both under the larger of their
scales.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvlinker.engines.embedded.model.states.rules import (
    Effect,
    Gates,
    Mixed,
    Rule,
    RuleCall,
    Seam,
)

NOTHING = -1e38
"""The logarithm of a scale under which nothing has been written, as RWKV has it."""


class Scaled(Rule):
    """A rule with a scale.

    An effect's factor is [heads, rows, 2], the logarithms of how a state fades and of the scale of
    what is written; its offset, [heads, rows, columns - 1], is under that scale.
    """

    has_scale: ClassVar[bool] = True

    @abstractmethod
    def fading(self, call: RuleCall, mixed: Mixed, gates: Gates) -> Tensor:
        """Return the logarithm of what is left of a state after tokens [1, tokens, …]: [heads, rows
        or 1]."""

    def effect(
        self, call: RuleCall, mixed: Mixed, gates: Gates, before: Effect | None, seam: Seam
    ) -> Effect:
        earlier = None if before is None else _joined(before.offset, before.factor[..., 1])[None]
        written = call.scan(mixed, gates, earlier, seam)[1][0]
        fading = self.fading(call, mixed, gates).float().expand(written.shape[:2])
        if before is not None:
            fading = fading + before.factor[..., 0]
        return Effect(torch.stack([fading, written[..., -1]], -1), written[..., :-1])

    def applied(self, effect: Effect, state: Tensor) -> Tensor:
        fading, written = effect.factor.unbind(-1)
        kept = state[..., -1] + fading
        scale = torch.maximum(kept, written)
        numbers = (
            torch.exp(kept - scale)[..., None] * state[..., :-1]
            + torch.exp(written - scale)[..., None] * effect.offset
        )
        return _joined(numbers, scale)

    def effect_values(self, shape: tuple[int, ...]) -> tuple[int, int]:
        heads, rows, columns = shape
        return 2 * heads * rows, heads * rows * (columns - 1)


def _joined(numbers: Tensor, scale: Tensor) -> Tensor:
    """Return a state [..., rows, columns] of its numbers and the logarithms of its scale [...,
    rows]."""
    return torch.cat([numbers.float(), scale.float()[..., None]], -1)


class TimeMixing(Scaled):
    """RWKV's: the function is a module's whole ``forward``, made of what enters it and of the token
    before. The numbers are a numerator and a denominator for each channel."""

    def start(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        state = torch.zeros(shape, device=device)
        state[..., -1] = NOTHING
        return state

    def scan(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        changed: Mapping[str, Tensor],
        state: Tensor | None,
        seam: Seam,
    ) -> tuple[Tensor, Tensor]:
        module, hidden = arguments["self"], changed[self.written]
        batch, tokens, _ = hidden.shape
        if state is None:
            shape = (batch, 1, len(module.time_decay), 3)
            state = self.start(shape, hidden.device)
        earlier = torch.zeros_like(hidden[:, 0]) if seam.before is None else seam.before[..., -1]
        held = [_OfOneLayer(earlier[:, None] if tokens == 1 else earlier)]
        held += [_OfOneLayer(each) for each in state[:, 0].unbind(-1)]
        output, _ = function(module, hidden, state=[None, *held], use_cache=True)
        return output, torch.stack([each.value for each in held[1:]], -1)[:, None]

    def fading(self, call: RuleCall, mixed: Mixed, gates: Gates) -> Tensor:
        decay: Tensor = call.arguments["self"].time_decay
        return -torch.exp(decay.float())[None] * mixed[0].shape[1]

    def returned(
        self, arguments: Mapping[str, Any], output: Tensor, last: Tensor | None
    ) -> tuple[Tensor, Any]:
        return output, arguments.get("state")


class _OfOneLayer:
    """Stands for what all layers hold, [batch, channels, layers], and has one layer's."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __getitem__(self, place: Any) -> Tensor:
        return self.value

    def __setitem__(self, place: Any, value: Tensor) -> None:
        self.value = value


class MatrixMemory(Scaled):
    """The mLSTM's: a matrix and a vector that normalises what is read from it, [rows, columns] and
    [rows], under one scale a head. Heads come before tokens in the function's arguments."""

    def argument(self, given: Tensor) -> Tensor:
        return given.transpose(1, 2)

    def scan(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        changed: Mapping[str, Tensor],
        state: Tensor | None,
        seam: Seam,
    ) -> tuple[Tensor, Tensor]:
        given = dict(arguments)
        given.pop(self.final, None)
        given |= {name: part.transpose(1, 2).float() for name, part in changed.items()}
        if state is None:
            batch, heads, _, rows = given["key"].shape
            state = given["key"].new_zeros(batch, heads, rows, given["value"].shape[-1] + 2)
            state[..., -1] = NOTHING
        initial = {
            "c_initial": state[..., :-2].contiguous(),
            "n_initial": state[..., -2].contiguous(),
            "m_initial": state[..., :1, -1].contiguous(),
        }
        output, (memory, norm, scale) = function(
            **given | initial | {"return_last_states": True, "mode": "inference"}
        )
        rows = scale.expand(norm.shape)
        output = output.transpose(1, 2).to(changed[self.written].dtype)
        return output, torch.cat([memory, norm[..., None], rows[..., None]], -1)

    def fading(self, call: RuleCall, mixed: Mixed, gates: Gates) -> Tensor:
        _, forget = gates
        return F.logsigmoid(forget[0].float()).sum(0)[:, None]

    def returned(
        self, arguments: Mapping[str, Any], output: Tensor, last: Tensor | None
    ) -> tuple[Tensor, Any]:
        output = output.transpose(1, 2)
        if last is None:
            return output, None
        return output, (last[..., :-2], last[..., -2], last[..., :1, -1])
