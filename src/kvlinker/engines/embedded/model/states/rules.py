"""Rules by which each token changes a state, as modeling modules call them.

Every rule is affine in the state: a token makes of S a product of S plus what it writes. So tokens
that follow one another together are one map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Mixed = tuple[Tensor, ...]
"""A rule's arguments that are made of the convolution's output: [batch, tokens, heads, dim] each,
or groups in place of heads, or without any."""

Gates = tuple[Tensor, ...]
"""A rule's other arguments with a value for each token: [batch, tokens, …] each."""


class Effect(NamedTuple):
    """The effect of tokens on any state: S → factor · S + offset."""

    factor: Tensor
    """[heads, rows, rows], or one number for each head, [heads, 1, 1], or for each element."""

    offset: Tensor
    """[heads, rows, columns]."""


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

    final: str
    """The name of the flag that asks for the state after the last token."""

    factor: Literal["matrix", "number", "elements"]
    """The form of a map's factor: a matrix that the state is multiplied by, one number for each
    head, or one for each element of the state."""

    initial: str = ""
    """The name of the argument that gives the state before the first token."""

    always_pairs: bool = False
    """True if the function returns a pair even if no state is asked for."""

    takes_channels: bool = True
    """True if the arguments are channels of the convolution's output, not computed from it."""

    def argument(self, given: Tensor) -> Tensor:
        """Return one of the arguments with a value for each token: [batch, tokens, …]."""
        return given

    def scan(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        changed: Mapping[str, Tensor],
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output [batch, tokens, heads, dim] of tokens whose arguments are ``changed``,
        and the state [batch, heads, rows, columns] after them; before them it is ``state``, or
        nothing."""
        given = {**arguments, **changed, self.initial: state, self.final: True}
        usual = given.get("chunk_size")
        if usual is not None:  # tokens are padded to a multiple of it
            given["chunk_size"] = min(usual, changed[self.written].shape[1])
        output, last = function(**given)
        return output, last

    def returned(
        self, arguments: Mapping[str, Any], output: Tensor, last: Tensor | None
    ) -> tuple[Tensor, Any]:
        """Return the output of all tokens of the call, and the state after them, as the function
        does."""
        return output, last

    def effect(self, call: RuleCall, mixed: Mixed, gates: Gates, before: Effect | None) -> Effect:
        """Return what tokens [1, tokens, …] do to any state, after others that do ``before``: it is
        read off the rule itself. The offset is what it makes of no state, the factor what it makes
        of a unit state when nothing is written."""
        offset = call.scan(mixed, gates, None if before is None else before.offset[None])[1]
        heads, rows, columns = offset.shape[1:]
        nothing = []
        for name, argument in zip(self.mixed, mixed, strict=True):
            width = rows if self.factor == "matrix" else argument.shape[-1]
            written = argument.new_zeros(*argument.shape[:-1], width)
            nothing.append(written if name == self.written else argument)
        if self.factor == "matrix":
            unit = torch.eye(rows, device=offset.device).expand(heads, rows, rows)
        else:
            unit = offset.new_ones(heads, 1, 1)
        state = (unit if before is None else before.factor).to(offset.dtype)
        if self.factor != "matrix":
            state = state.expand(heads, rows, columns)
        factor = call.scan(tuple(nothing), gates, state[None].contiguous())[1][0]
        return Effect(factor[:, :1, :1] if self.factor == "number" else factor, offset[0])

    def applied(self, effect: Effect, state: Tensor) -> Tensor:
        """Return the state [..., heads, rows, columns] after tokens of this effect."""
        product = effect.factor @ state if self.factor == "matrix" else effect.factor * state
        return product + effect.offset

    def effect_values(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return how many numbers the factor and the offset are of an effect on a state of this
        shape."""
        heads, rows, columns = shape
        numbers = {"matrix": rows * rows, "number": 1, "elements": rows * columns}
        return heads * numbers[self.factor], heads * rows * columns


@dataclass(frozen=True, slots=True)
class RuleCall:
    """One call of a rule's function by a model."""

    rule: Rule
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    """The arguments that the model passes, by name."""

    @property
    def mixed(self) -> Mixed:
        """The arguments that are made of the convolution's output."""
        return tuple(self.rule.argument(self.arguments[name]) for name in self.rule.mixed)

    @property
    def gates(self) -> Gates:
        """The other arguments with a value for each token."""
        return tuple(self.rule.argument(self.arguments[name]) for name in self.rule.gates)

    @property
    def wants_state(self) -> bool:
        """True if the model asks for the state after the last token."""
        return bool(self.arguments.get(self.rule.final))

    def scan(self, mixed: Mixed, gates: Gates, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output [batch, tokens, …] of other tokens, and the state [batch, heads, rows,
        columns] after them; before them it is ``state``, or nothing."""
        changed = {
            **dict(zip(self.rule.mixed, mixed, strict=True)),
            **dict(zip(self.rule.gates, gates, strict=True)),
        }
        return self.rule.scan(self.function, self.arguments, changed, state)

    def returned(self, output: Tensor, last: Tensor | None) -> Any:
        """Return what the model gets: the output [1, tokens, …] of all tokens of the call, and the
        state [1, heads, rows, columns] after them where it wants that."""
        output, last = self.rule.returned(self.arguments, output, last)
        return (output, last) if self.wants_state or self.rule.always_pairs else output

    def effect(self, mixed: Mixed, gates: Gates, before: Effect | None) -> Effect:
        """Return what tokens [1, tokens, …] do to any state, after others that do ``before``."""
        return self.rule.effect(self, mixed, gates, before)
