"""Layers that keep a state of fixed size instead of keys and values: a short convolution over the
last tokens, and behind it, in most, a rule by which each token changes the state.

Every known rule is affine in the state: a token makes of S a product of S plus what it writes. So
tokens that follow one another together are one map, S → factor · S + offset. Both are read off the
model's own rule: the offset is what it makes of no state, the factor what it makes of a unit state
when nothing is written. No position is in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

CONVOLUTION = "causal_conv1d_fn"
"""The function by which modeling modules convolve what enters a rule."""

Mixed = tuple[Tensor, ...]
"""A rule's arguments that are made of the convolution's output: [batch, tokens, heads, dim] each,
or groups in place of heads."""

Gates = tuple[Tensor, ...]
"""A rule's other arguments with a value for each token: [batch, tokens, …] each."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The form in which modeling modules call a function that changes a state by tokens."""

    function: str
    """The function's name."""

    mixed: tuple[str, ...]
    """The names of the arguments that are made of the convolution's output."""

    gates: tuple[str, ...]
    """The names of the other arguments with a value for each token."""

    written: str
    """The one of ``mixed`` that is written into the state."""

    initial: str
    """The name of the argument that gives the state before the first token."""

    final: str
    """The name of the flag that asks for the state behind the last token."""

    is_matrix: bool
    """Tells whether a map's factor is a matrix that the state is multiplied by, and not one number
    for each head."""

    always_pairs: bool
    """Tells whether the function returns a pair even where no state is asked for."""


RULES = (
    *(
        Rule(
            name,
            ("query", "key", "value"),
            ("g", "beta"),
            "value",
            "initial_state",
            "output_final_state",
            is_matrix=True,
            always_pairs=True,
        )
        for name in ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
    ),
    Rule(
        "mamba2_chunk_scan",
        ("hidden_states", "B", "C"),
        ("dt",),
        "hidden_states",
        "initial_states",
        "return_final_states",
        is_matrix=False,
        always_pairs=False,
    ),
)


class Effect(NamedTuple):
    """What tokens do to any state: S → factor · S + offset."""

    factor: Tensor
    """[heads, rows, rows], or one number for each head: [heads, 1, 1]."""

    offset: Tensor
    """[heads, rows, columns]."""


@dataclass(frozen=True, slots=True)
class RuleCall:
    """One call of a rule's function by a model."""

    rule: Rule
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    """What the model hands over, by name."""

    @property
    def mixed(self) -> Mixed:
        """The arguments that are made of the convolution's output."""
        return tuple(self.arguments[name] for name in self.rule.mixed)

    @property
    def gates(self) -> Gates:
        """The other arguments with a value for each token."""
        return tuple(self.arguments[name] for name in self.rule.gates)

    @property
    def wants_state(self) -> bool:
        """Tells whether the model asks for the state behind the last token."""
        return bool(self.arguments.get(self.rule.final))

    def scan(self, mixed: Mixed, gates: Gates, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output [batch, tokens, heads, dim] of other tokens, and the state [batch,
        heads, rows, columns] behind them; before them it is ``state``, or zero."""
        arguments = {
            **self.arguments,
            **dict(zip(self.rule.mixed, mixed, strict=True)),
            **dict(zip(self.rule.gates, gates, strict=True)),
            self.rule.initial: state,
            self.rule.final: True,
        }
        usual = arguments.get("chunk_size")
        if usual is not None:  # tokens are padded to a multiple of it
            arguments["chunk_size"] = min(usual, mixed[0].shape[1])
        output, last = self.function(**arguments)
        return output, last

    def effect(self, mixed: Mixed, gates: Gates, before: Effect | None) -> Effect:
        """Return what tokens [1, tokens, …] do to any state, behind others that do ``before``."""
        offset = self.scan(mixed, gates, None if before is None else before.offset[None])[1]
        heads, rows, columns = offset.shape[1:]
        nothing = [
            argument.new_zeros(*argument.shape[:-1], rows) if self._writes(name) else argument
            for name, argument in zip(self.rule.mixed, mixed, strict=True)
        ]
        if self.rule.is_matrix:
            unit = torch.eye(rows, device=offset.device).expand(heads, rows, rows)
        else:
            unit = offset.new_ones(heads, 1, 1)
        state = (unit if before is None else before.factor).to(offset.dtype)
        if not self.rule.is_matrix:
            state = state.expand(heads, rows, columns)
        factor = self.scan(tuple(nothing), gates, state[None].contiguous())[1][0]
        return Effect(factor if self.rule.is_matrix else factor[:, :1, :1], offset[0])

    def _writes(self, name: str) -> bool:
        return name == self.rule.written


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

    has_rule: bool
    """Tells whether a rule is applied to what is convolved."""

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
    or groups, dim]."""

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
        return heads * (rows * columns + (rows * rows if self._is_matrix else 1))

    @property
    def tensors_held(self) -> int:
        """The number of tensors that the model's own cache has of it: the context of the
        convolution, and the state."""
        return 1 if self.rule is None else 2

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
        return (factor @ state if self._is_matrix else factor * state) + offset

    @property
    def _is_matrix(self) -> bool:
        return self.rule is not None and self.rule.is_matrix
