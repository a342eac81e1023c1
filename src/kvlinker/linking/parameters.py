"""Parameters of policies are declared as dataclass fields, and written after the family's name with
hyphens.

A field is declared with ``number``, ``percentage`` or ``choice``; words stand in the order of the
fields.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

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

    def rounded(self, value: float) -> float:
        """Return a number with the digits that are written."""
        if self.whole:
            return value
        return abs(round(float(value), _DECIMALS))  # abs: -0.0 would be written -0


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
