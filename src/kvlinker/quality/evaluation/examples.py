"""Holds examples that are put to a model, and the results that policies get on them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import ClassVar

from kvlinker.base.types.answers import Usage

REFERENCE = "full"
"""The policy that all are compared with."""


@dataclass(frozen=True)
class _Example:
    """The fields of all examples."""

    id: str
    """The example's name within its data set."""
    dataset: str
    task: str
    """The task whose score the example counts in."""
    passages: tuple[str, ...]
    """Texts, each of which becomes a chunk."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of all fields, the last two only where there are some, as they came after
        results were kept by it: equal examples are asked once."""
        later = ("choices", "wrong")
        fields = {name: value for name, value in asdict(self).items() if name not in later or value}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Question(_Example):
    """Holds a question after passages, and the answers that count as right."""

    question: str
    answers: tuple[str, ...]
    metric: str = "f1"
    """The metric that the task is usually measured by, a key of ``METRICS``."""
    max_tokens: int = 32
    """The longest answer, in tokens."""
    first_line: bool = True
    """True if the answer ends with its first line, as papers score short answers."""
    whole: bool = False
    """True if the question makes no sense with passages taken out."""
    choices: tuple[str, ...] = ()
    """The answers of which the model has to give one; none where it answers freely."""
    wrong: tuple[str, ...] = ()
    """The names in wrong passages: an answer with one of them mixes passages up."""


@dataclass(frozen=True)
class Continuation(_Example):
    """A text after passages, each of whose tokens is scored after all tokens before it."""

    continuation: str
    metric: ClassVar[str] = "loss"
    whole: ClassVar[bool] = False


Example = Question | Continuation


@dataclass(frozen=True, slots=True)
class Skipped:
    """An example that could not be asked, with the reason."""

    where: str
    """The example's place: its record in a file, or its data set and id."""
    reason: str


@dataclass(frozen=True, slots=True)
class Dataset:
    """Holds the examples of one source."""

    name: str
    format: str
    """The format that the source was recognised by."""
    examples: tuple[Example, ...]
    skipped: tuple[Skipped, ...] = ()
    """The records that are no examples."""


@dataclass(frozen=True, slots=True)
class _Result:
    """The fields of all results."""

    example: str
    """The example's digest."""
    policy: str
    cached_tokens: int
    recomputed_tokens: int
    agreement: float
    """The share of the compared tokens for which the most likely one is full's."""
    kl: float
    """The mean divergence of the compared tokens' distributions from full's, in nats."""

    @property
    def recomputed_fraction(self) -> float:
        """Tokens computed again over all tokens that chunk caches held."""
        return Usage(self.cached_tokens, self.recomputed_tokens, fresh_tokens=0).recomputed_fraction


@dataclass(frozen=True, slots=True)
class ExampleAnswer(_Result):
    """Holds a question's answer; ``agreement`` and ``kl`` are those of its first token."""

    text: str
    answer_agreement: float
    """The share of the tokens along full's answer for which the most likely one is full's."""
    answer_kl: float
    """The mean divergence of the distributions along full's answer from full's, in nats."""


@dataclass(frozen=True, slots=True)
class Scored(_Result):
    """Says how likely a continuation is; all tokens that count in its loss are compared with
    full's."""

    loss: float
    """The mean loss in nats per token."""


Result = ExampleAnswer | Scored
"""The result of one policy on one example."""

ExampleResults = tuple[Result, ...] | Skipped
"""The results of one example, one for each policy, or why it has none."""
