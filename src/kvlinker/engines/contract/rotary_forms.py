"""The forms in which models' functions rotate: queries and keys at once or one by one, or queries
alone where no keys are given, by cos and sin or complex numbers, with heads before tokens or after
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Signature, signature
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

RotaryFunction = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes query and key [1, heads, tokens, width], cos and sin [1, tokens, columns], and returns the
first two with rotary embedding."""

TABLES = {"cos", "sin"}, {"freqs_cis"}
"""The names of functions' arguments for the tables that they rotate by."""


class Rotation(NamedTuple):
    """One call of a model's function: what it does, and the tables that it was given."""

    apply: RotaryFunction
    key: Tensor
    """The rotated tensor, of queries and keys the keys: [1, heads, tokens, width]."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class RotaryForm:
    """The form of one function: ``rotated`` names the parameters that it rotates, one or two, and
    ``tables`` those that say by how much."""

    function: Callable[..., Any]
    signature: Signature
    rotated: tuple[str, ...]
    tables: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Self | None:
        """Read the form from the names of a function's parameters; None if it is not known."""
        found = signature(function)
        names = list(found.parameters)
        rotated = tuple(names[: next((at for at, name in enumerate(names) if _is_table(name)), 0)])
        tables = tuple(name for name in names if _is_table(name))
        if len(rotated) not in (1, 2) or set(tables) not in TABLES:
            return None
        return cls(function, found, rotated, tables)

    def unchanged(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the function's own arguments in place of its result."""
        found = args[: len(self.rotated)]
        if len(found) < len(self.rotated):
            bound = self.signature.bind(*args, **kwargs).arguments
            found = tuple(bound.get(name) for name in self.rotated)
        found = tuple(each for each in found if each is not None)
        return found if len(found) > 1 else found[0]

    def rotation(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Rotation:
        """Read one call."""
        bound = self.signature.bind(*args, **kwargs).arguments
        rotated = [name for name in self.rotated if bound.get(name) is not None]
        heads = bound[rotated[-1]]
        tables = [bound[name] for name in self.tables]
        cos, sin = (tables[0].real, tables[0].imag) if len(tables) == 1 else tables
        if self.tables[0] == "sin":
            cos, sin = sin, cos
        heads_first = heads.shape[2] == cos.shape[-2]
        options = {
            name: value
            for name, value in bound.items()
            if name not in (*self.rotated, *self.tables) and not isinstance(value, Tensor)
        }

        def apply(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            given = dict(zip(self.tables, self._tables(cos, sin), strict=True))
            if not heads_first:
                query, key = query.transpose(1, 2), key.transpose(1, 2)
            if len(rotated) == 2:
                query, key = self.function(query, key, **given, **options)
            else:
                query, key = (self.function(each, **given, **options) for each in (query, key))
            return (query, key) if heads_first else (query.transpose(1, 2), key.transpose(1, 2))

        return Rotation(apply, heads if heads_first else heads.transpose(1, 2), cos, sin)

    def _tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Return the tables as the function takes them, in the order of their names."""
        if len(self.tables) == 1:
            return (torch.complex(cos, sin),)
        return (sin, cos) if self.tables[0] == "sin" else (cos, sin)


def _is_table(name: str) -> bool:
    return any(name in names for names in TABLES)
