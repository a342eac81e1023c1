"""Layers that keep a state of fixed size instead of keys and values: a short convolution over the
last tokens, and behind it, in most, a rule by which each token changes the state.

Every known rule (``rules.py``) is affine in the state: a token makes of S a product of S plus what
it writes. So tokens that follow one another together are one map, S → factor · S + offset. Both are
read off the model's own rule: the offset is what it makes of no state, the factor what it makes of
a unit state when nothing is written. No position is in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlinker.engines.embedded.model.states.rules import Effect, Mixed, Rule


def unconvolved(hidden: Tensor, weight: Tensor) -> Tensor:
    """Take the place of the convolution before a rule that has none."""
    return hidden


@dataclass(frozen=True, slots=True)
class ConvolutionCall:
    """One call of the convolution by a model."""

    function: Callable[..., Tensor]
    hidden: Tensor
    """What is convolved: [1, channels, tokens]."""

    weight: Tensor
    """[channels, width]."""

    options: Mapping[str, Any]
    """Bias and activation."""

    rules: tuple[Rule, ...]
    """Those that the modeling module has: one of them is applied to what is convolved, or none."""

    @property
    def is_taken_apart(self) -> bool:
        """Tells whether the model takes apart what is convolved, and no more, before a rule."""
        return bool(self.rules) and all(rule.takes_channels for rule in self.rules)

    def apply(self, before: Tensor, hidden: Tensor) -> Tensor:
        """Return ``hidden`` [batch, channels, tokens] convolved, behind the last tokens ``before``
        [batch, channels, width - 1]."""
        together = torch.cat([before, hidden], dim=-1)
        found = self.function(together, weight=self.weight, **self.options)
        return found[..., before.shape[-1] :]


@dataclass(frozen=True, slots=True, eq=False)
class Recurrence:
    """One layer that keeps a state."""

    rule: Rule | None
    """The rule behind its convolution; None where a convolution is all that it has."""

    columns: tuple[Tensor, ...]
    """For each of the rule's mixed arguments, the channels of the convolution that it takes: [heads
    or groups, dim]; empty where they are computed of all."""

    channels: int
    """The channels of the convolution."""

    window: int
    """The number of tokens before it that a token's convolution sees."""

    state_shape: tuple[int, ...]
    """[heads, rows, columns]; no heads where it has no rule."""

    gate_bytes: int
    """The bytes of one token's gates."""

    @property
    def effect_values(self) -> int:
        """The number of values of an effect."""
        heads, rows, columns = self.state_shape
        factor = {"matrix": rows * rows, "number": 1, "elements": rows * columns}
        return heads * (rows * columns + (0 if self.rule is None else factor[self.rule.factor]))

    @property
    def tensors_held(self) -> int:
        """The number of tensors that the model's own cache has of it: the context of the
        convolution, and the state."""
        return bool(self.window) + (self.rule is not None)

    def entering_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of what enters the layer of one token, with a convolution of this
        dtype."""
        return self.channels * dtype.itemsize + self.gate_bytes

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one sequence's state, of which the context of the convolution is of
        this dtype."""
        state = math.prod(self.state_shape) * torch.float32.itemsize
        return state + self.channels * self.window * dtype.itemsize

    def mixed(self, convolved: Tensor) -> Mixed:
        """Return the rule's arguments that are made of what is convolved, [batch, channels,
        tokens]."""
        tokens = convolved.transpose(1, 2)
        return tuple(tokens[..., columns.to(tokens.device)] for columns in self.columns)

    def applied(self, effect: Effect, state: Tensor) -> Tensor:
        """Return the state [heads, rows, columns] behind tokens of this effect."""
        factor, offset = (part.to(state) for part in effect)
        is_matrix = self.rule is not None and self.rule.factor == "matrix"
        return (factor @ state if is_matrix else factor * state) + offset
