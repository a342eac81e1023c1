"""What is asked: an example, and a data set of them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property


@dataclass(frozen=True)
class Example:
    """Passages, each a chunk of its own, a question behind them, and the answers that count as right.

    ``metric``: the one that its task is usually measured by. ``max_tokens``: longest answer. ``first_line``: whether
    the answer ends with its first line, as papers score short answers. ``whole``: it makes no sense with passages taken
    out.
    """

    id: str
    dataset: str
    task: str
    passages: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    metric: str = "f1"
    max_tokens: int = 32
    first_line: bool = True
    whole: bool = False

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of all fields: equal examples are asked once."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


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
