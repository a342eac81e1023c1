"""What models are examined with: examples, and data sets of them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import ClassVar


@dataclass(frozen=True)
class _Example:
    """What all examples have: passages, each a chunk of its own. Scores are given by ``dataset`` and ``task``."""

    id: str
    dataset: str
    task: str
    passages: tuple[str, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of all fields: equal examples are asked once."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Question(_Example):
    """A question behind the passages, and the answers that count as right.

    ``metric``: the one that its task is usually measured by. ``max_tokens``: longest answer. ``first_line``: whether
    the answer ends with its first line, as papers score short answers. ``whole``: it makes no sense with passages taken
    out.
    """

    question: str
    answers: tuple[str, ...]
    metric: str = "f1"
    max_tokens: int = 32
    first_line: bool = True
    whole: bool = False


@dataclass(frozen=True)
class Continuation(_Example):
    """Text behind the passages, of which each token is scored after all that stands before it."""

    continuation: str
    metric: ClassVar[str] = "loss"
    whole: ClassVar[bool] = False


Example = Question | Continuation
"""What is put to a model."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """An example that could not be asked: ``where`` it stands, and why."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Dataset:
    """Examples under one name, and what of its source could not be used."""

    name: str
    examples: tuple[Example, ...]
    skipped: tuple[Skipped, ...] = ()
