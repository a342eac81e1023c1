"""Layers that keep a state of fixed size instead of keys and values: a short convolution over the
last tokens, and after it, in most, a rule (``rules.py``) by which each token changes the state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
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
    """The input of the convolution: [1, channels, tokens]."""

    weight: Tensor
    """[channels, width]."""

    options: dict[str, Any]
    """Bias and activation."""

    rules: tuple[Rule, ...]
    """The rules of the modeling module. The model applies one of them to the output, or none."""

    @property
    def is_split(self) -> bool:
        """True if the model only splits the convolution's output before a rule."""
        return bool(self.rules) and all(rule.takes_channels for rule in self.rules)

    def apply(self, before: Tensor, hidden: Tensor) -> Tensor:
        """Return ``hidden`` [batch, channels, tokens] convolved, after the last tokens ``before``
        [batch, channels, width - 1]."""
        together = torch.cat([before, hidden], dim=-1)
        found = self.function(together, weight=self.weight, **self.options)
        return found[..., before.shape[-1] :]

    def divided(self, parts: int) -> list[ConvolutionCall]:
        """Return a call for each of as many parts of the channels, which are as large."""
        if parts == 1:
            return [self]
        hidden, weight = self.hidden.chunk(parts, 1), self.weight.chunk(parts)
        bias = self.options.get("bias")
        biases = [None] * parts if bias is None else bias.chunk(parts)
        return [
            replace(
                self, hidden=hidden[part], weight=weight[part], options=self.options | {"bias": one}
            )
            for part, one in enumerate(biases)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Recurrence:
    """One layer that keeps a state."""

    rule: Rule | None
    """The rule after its convolution; None if a convolution is all that it has."""

    columns: tuple[Tensor, ...]
    """For each of the rule's mixed arguments, the channels of the convolution that it takes: [heads
    or groups, dim]; empty if they are computed of all."""

    channels: int
    """The channels of the convolution."""

    window: int
    """The number of tokens before it that a token's convolution sees."""

    state_shape: tuple[int, ...]
    """[heads, rows, columns]; no heads where it has no rule."""

    gate_bytes: int
    """The bytes of one token's gates."""

    goes_on: bool = False
    """True if it is a further part of the channels of the layer before: heads that the model
    applies its rule to one after the other, after one convolution."""

    def effect_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of an effect, where chunks are kept in this dtype."""
        if self.rule is None:
            return 0
        factor, offset = self.rule.effect_values(self.state_shape)
        return (factor + offset) * dtype.itemsize

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
        """Return the state [heads, rows, columns] after tokens of this effect."""
        assert self.rule is not None, "a convolution alone has no map"
        return self.rule.applied(Effect(*(part.to(state) for part in effect)), state)


def tensors_held(recurrences: Iterable[Recurrence]) -> int:
    """Count the tensors that a model's own cache has of layers with a state: for each, the context
    of the convolution, and the state."""
    return sum(
        bool(each.window) + (each.rule is not None) for each in recurrences if not each.goes_on
    )
