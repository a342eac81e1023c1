"""Parameters of policies are declared as dataclass fields, and written after the family's name with
hyphens.

A field is declared with ``number``, ``percentage`` or ``choice``; words stand in the order of the
fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from itertools import product
from typing import Any

from kvlinker.base.errors import PolicyError

_KEY = "kvlinker"
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_DECIMALS = 9
_TRIALS = 9


@dataclass(frozen=True, slots=True)
class Number:
    """A number from ``minimum`` to ``maximum``, written after ``prefix``; required without a
    default."""

    meaning: str
    minimum: float
    maximum: float
    whole: bool
    prefix: str
    default: float | None = None
    proposed: tuple[float, ...] = ()

    @property
    def trials(self) -> tuple[float, ...]:
        """The values worth trying, ascending: those proposed, or doublings from the lower end of
        the range."""
        doubled = (max(self.minimum, 1) * 2**step for step in range(_TRIALS))
        return self.proposed or tuple(value for value in doubled if value <= self.maximum)

    @property
    def allowed(self) -> str:
        return (
            f"{'a whole number' if self.whole else 'a number'} from {self.minimum:g} to"
            f" {self.maximum:g}"
        )

    @property
    def examples(self) -> tuple[float, ...]:
        """The default, or the number in the middle of the range."""
        middle = (self.minimum + self.maximum) / 2
        own = int(middle) if self.whole else middle
        return (own if self.default is None else self.default,)

    def usage(self, name: str) -> str:
        """Show how users write it behind the family's name."""
        word = f"-{self.prefix}<{name}, {self.minimum:g} to {self.maximum:g}>"
        return word if self.default is None else f"[{word}]"

    def describe(self) -> dict[str, Any]:
        return {
            "type": "integer" if self.whole else "number",
            "minimum": self.minimum,
            "maximum": self.maximum,
            "prefix": self.prefix,
        }

    def read(self, text: str) -> float | int | None:
        """Parse the value that ``text`` writes; None when it is something else."""
        if not text.startswith(self.prefix):
            return None
        digits = text[len(self.prefix) :]
        if not (digits.isascii() and _NUMBER.fullmatch(digits)) or (self.whole and "." in digits):
            return None
        return int(digits) if self.whole else float(digits)

    def write(self, value: object) -> str:
        decimal = not self.whole and isinstance(value, int | float)
        return self.prefix + (
            f"{value:.{_DECIMALS}f}".rstrip("0").rstrip(".") if decimal else str(value)
        )

    def accepts(self, value: object) -> bool:
        number = isinstance(value, int if self.whole else int | float) and not isinstance(
            value, bool
        )
        return number and self.minimum <= value <= self.maximum  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class WordParameter:
    """A choice among several words; the first is the default, and is not written."""

    meaning: str
    words: tuple[str, ...]

    @property
    def default(self) -> str:
        return self.words[0]

    @property
    def allowed(self) -> str:
        return " or ".join(self.words)

    @property
    def examples(self) -> tuple[str, ...]:
        return self.words

    def usage(self, name: str) -> str:
        return f"[-{'|'.join(self.words[1:])}]"

    def describe(self) -> dict[str, Any]:
        return {"type": "choice", "values": list(self.words)}

    def read(self, text: str) -> str | None:
        return text if text in self.words[1:] else None

    def write(self, value: object) -> str:
        return str(value)

    def accepts(self, value: object) -> bool:
        return value in self.words


def number(
    meaning: str,
    minimum: float,
    maximum: float,
    *,
    whole: bool = True,
    prefix: str = "",
    default: float | None = None,
    trials: tuple[float, ...] = (),
) -> Any:
    """Declare a dataclass field for a number; ``meaning`` is its unit, such as "tokens". Without a
    default it is required.

    ``trials`` are the values that ``kvlinker calibrate`` tries, where the lower end of the range is
    of no use.
    """
    declared = Number(meaning, minimum, maximum, whole, prefix, default, trials)
    return field(default=MISSING if default is None else default, metadata={_KEY: declared})


def percentage(meaning: str = "percent", *, default: float | None = None) -> Any:
    """Declare a dataclass field for a share of tokens in percent, from 0 to 100, fractions
    allowed."""
    return number(
        meaning, 0, 100, whole=False, default=default, trials=(1, 2, 5, 10, 15, 20, 30, 50, 75)
    )


def choice(meaning: str, *words: str) -> Any:
    """Declare a dataclass field for one of several words, the first being the default."""
    return field(default=words[0], metadata={_KEY: WordParameter(meaning, words)})


def declared(cls: type) -> dict[str, Number | WordParameter]:
    """Return the parameters of a policy class, by field name, in the order in which they are
    written."""
    return {entry.name: entry.metadata[_KEY] for entry in fields(cls) if _KEY in entry.metadata}


def check(policy: str, values: Any) -> None:
    """Check the fields of ``values``, the policy of this name; numbers get the digits that are
    written.

    Raises PolicyError for a value out of its range.
    """
    for name, parameter in declared(type(values)).items():
        value = getattr(values, name)
        if not parameter.accepts(value):
            raise PolicyError(
                f"Policy {policy!r}: {name} is {_shown(value)}, but must be {parameter.allowed}.",
                param="link.policy",
            )
        if isinstance(parameter, Number) and not parameter.whole:
            object.__setattr__(
                values, name, abs(round(float(value), _DECIMALS))
            )  # abs: -0.0 would be written -0


def write(values: Any) -> list[str]:
    """Return the words that stand after the family's name; defaults are left out."""
    return [
        parameter.write(getattr(values, name))
        for name, parameter in declared(type(values)).items()
        if getattr(values, name) != parameter.default
    ]


def read(cls: type, family: str, text: str | None) -> dict[str, Any]:
    """Parse the field values that ``text`` writes, such as "15-onestep"; None if nothing is
    written.

    Raises PolicyError for words that no parameter takes, for repeated ones, and for required ones
    that are missing.
    """
    values: dict[str, Any] = {}
    parameters = declared(cls)
    for word in [] if text is None else text.split("-"):
        for name, parameter in parameters.items():
            if name not in values and (value := parameter.read(word)) is not None:
                values[name] = value
                break
        else:
            raise PolicyError(
                f"Policy {family!r} does not take {word!r} in '{family}-{text}'. It is written"
                f" {usage(cls, family)}.",
                param="link.policy",
            )
    for name, parameter in parameters.items():
        if name not in values and parameter.default is None:
            raise PolicyError(
                f"Policy {family!r} needs {name} after a hyphen, {parameter.allowed}. "
                f"It is written {usage(cls, family)}.",
                param="link.policy",
            )
    return values


def usage(cls: type, family: str) -> str:
    """Show how users write the policy, such as ``cacheblend-<percent, 0 to 100>[-onestep]``."""
    return family + "".join(parameter.usage(name) for name, parameter in declared(cls).items())


def describe(cls: type) -> list[dict[str, Any]]:
    """Describe the parameters as JSON: name, meaning, and their range or words, with the default
    (None: required)."""
    return [
        {"name": name, "meaning": parameter.meaning}
        | parameter.describe()
        | {"default": parameter.default}
        for name, parameter in declared(cls).items()
    ]


def examples(cls: type) -> Iterator[dict[str, Any]]:
    """Yield field values for each choice of words, with default numbers, or numbers from the middle
    of their ranges."""
    parameters = declared(cls)
    for chosen in product(*(parameter.examples for parameter in parameters.values())):
        yield dict(zip(parameters, chosen, strict=True))


def _shown(value: object) -> str:
    return f"{value:.12g}" if isinstance(value, float) else repr(value)
