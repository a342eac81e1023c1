"""Parameters of policies: declared as dataclass fields, written behind the family's name with hyphens.

A field is declared with ``number``, ``percentage`` or ``choice``; words stand in the order of the fields.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from kvlinker.errors import PolicyError

_KEY = "kvlinker"
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_DECIMALS = 9
_TRIALS = 9


@dataclass(frozen=True, slots=True)
class Number:
    """A number from ``minimum`` to ``maximum``, written with ``prefix`` before it; required without a default."""

    meaning: str
    minimum: float
    maximum: float
    whole: bool
    prefix: str
    proposed: tuple[float, ...] = ()

    @property
    def trials(self) -> tuple[float, ...]:
        """Values worth trying, ascending: those proposed, or doublings from the lower end of the range."""
        doubled = (max(self.minimum, 1) * 2**step for step in range(_TRIALS))
        return self.proposed or tuple(value for value in doubled if value <= self.maximum)

    @property
    def allowed(self) -> str:
        return f"{'a whole number' if self.whole else 'a number'} from {self.minimum:g} to {self.maximum:g}"

    def read(self, text: str) -> float | int | None:
        """The value that ``text`` writes; None when it is something else."""
        if not text.startswith(self.prefix):
            return None
        digits = text[len(self.prefix) :]
        if not (digits.isascii() and _NUMBER.fullmatch(digits)) or (self.whole and "." in digits):
            return None
        return int(digits) if self.whole else float(digits)

    def write(self, value: object) -> str:
        decimal = not self.whole and isinstance(value, int | float)
        return self.prefix + (f"{value:.{_DECIMALS}f}".rstrip("0").rstrip(".") if decimal else str(value))

    def accepts(self, value: object) -> bool:
        number = isinstance(value, int if self.whole else int | float) and not isinstance(value, bool)
        return number and self.minimum <= value <= self.maximum  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several words; the first is the default, and is not written."""

    meaning: str
    words: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return " or ".join(self.words)

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
    """A dataclass field for a number; ``meaning`` is its unit, such as "tokens". Without a default it is required.

    ``trials``: the values that ``kvlinker calibrate`` tries, where the lower end of the range is not what is useful.
    """
    declared = Number(meaning, minimum, maximum, whole, prefix, trials)
    return field(metadata={_KEY: declared}) if default is None else field(default=default, metadata={_KEY: declared})


def percentage(meaning: str = "percent", *, default: float | None = None) -> Any:
    """A dataclass field for a share of tokens in percent, from 0 to 100, fractions allowed."""
    return number(meaning, 0, 100, whole=False, default=default, trials=(1, 2, 5, 10, 15, 20, 30, 50, 75))


def choice(meaning: str, *words: str) -> Any:
    """A dataclass field for one of several words, the first being the default."""
    return field(default=words[0], metadata={_KEY: Choice(meaning, words)})


def declared(cls: type) -> dict[str, tuple[Number | Choice, Field[Any]]]:
    """The parameters of a policy class, by field name, in the order in which they are written."""
    return {entry.name: (entry.metadata[_KEY], entry) for entry in fields(cls) if _KEY in entry.metadata}


def check(policy: str, values: Any) -> None:
    """Raises PolicyError when a field of ``values``, the policy of this name, is out of its range; numbers get the
    digits that are written."""
    for name, (parameter, _) in declared(type(values)).items():
        value = getattr(values, name)
        if not parameter.accepts(value):
            raise PolicyError(
                f"Policy {policy!r}: {name} is {_shown(value)}, but must be {parameter.allowed}.",
                param="link.policy",
            )
        if isinstance(parameter, Number) and not parameter.whole:
            object.__setattr__(values, name, abs(round(float(value), _DECIMALS)))  # abs: -0.0 would be written -0


def write(values: Any) -> list[str]:
    """The words that stand behind the family's name; defaults are left out."""
    return [
        parameter.write(getattr(values, name))
        for name, (parameter, entry) in declared(type(values)).items()
        if getattr(values, name) != entry.default
    ]


def read(cls: type, family: str, text: str | None) -> dict[str, Any]:
    """The field values that ``text`` writes ("15-onestep"; None: nothing is written).

    Raises PolicyError for what no parameter takes, for what is written twice, and for required ones that are missing.
    """
    values: dict[str, Any] = {}
    parameters = declared(cls)
    for word in [] if text is None else text.split("-"):
        for name, (parameter, _) in parameters.items():
            if name not in values and (value := parameter.read(word)) is not None:
                values[name] = value
                break
        else:
            raise PolicyError(
                f"Policy {family!r} does not take {word!r} in '{family}-{text}'. It is written {usage(cls, family)}.",
                param="link.policy",
            )
    for name, (parameter, entry) in parameters.items():
        if name not in values and isinstance(parameter, Number) and not _has_default(entry):
            raise PolicyError(
                f"Policy {family!r} needs {name} behind a hyphen, {parameter.allowed}. "
                f"It is written {usage(cls, family)}.",
                param="link.policy",
            )
    return values


def usage(cls: type, family: str) -> str:
    """How users write it, such as ``cacheblend-<percent, 0 to 100>[-onestep]``."""
    written = family
    for name, (parameter, entry) in declared(cls).items():
        if isinstance(parameter, Choice):
            written += f"[-{'|'.join(parameter.words[1:])}]"
        else:
            word = f"-{parameter.prefix}<{name}, {parameter.minimum:g} to {parameter.maximum:g}>"
            written += f"[{word}]" if _has_default(entry) else word
    return written


def describe(cls: type) -> list[dict[str, Any]]:
    """The parameters as JSON: name, meaning, and their range or words, with the default (None: required)."""
    described = []
    for name, (parameter, entry) in declared(cls).items():
        row: dict[str, Any] = {"name": name, "meaning": parameter.meaning}
        if isinstance(parameter, Choice):
            row |= {"type": "choice", "values": list(parameter.words)}
        else:
            row |= {"type": "integer" if parameter.whole else "number"}
            row |= {"minimum": parameter.minimum, "maximum": parameter.maximum, "prefix": parameter.prefix}
        described.append(row | {"default": entry.default if _has_default(entry) else None})
    return described


def _shown(value: object) -> str:
    return f"{value:.12g}" if isinstance(value, float) else repr(value)


def _has_default(entry: Field[Any]) -> bool:
    return entry.default is not MISSING
