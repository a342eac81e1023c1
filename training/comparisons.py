"""Questions that compare the ages of two people."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from training.entities import Entity
from training.questions import Question

_GAP = 5  # years; closer ages are not compared
_PER_PERSON = 2  # questions per person of the world


class Aged(NamedTuple):
    """A person and the age that a world states, in years."""

    person: Entity
    age: int


def comparisons(rng: random.Random, people: Sequence[Aged]) -> list[Question]:
    """Questions on random pairs of people, at most twice as many as there are people."""
    questions: list[Question] = []
    if len(people) < 2:
        return questions
    for _ in range(_PER_PERSON * len(people)):
        first, second = rng.sample(people, 2)
        if abs(first.age - second.age) < _GAP or _surname(first) == _surname(second):
            continue
        older, younger = sorted((first, second), key=lambda aged: -aged.age)
        word, right = rng.choice((("older", older), ("younger", younger)))
        text = f"What is the age of the {word} one, {first.person.name} or {second.person.name}?"
        answer = f"{_surname(first)} {first.age}, {_surname(second)} {second.age}: {right.age}"
        questions.append(Question(text, answer, "comparison", ""))
    return list(dict.fromkeys(questions))


def _surname(aged: Aged) -> str:
    return aged.person.name.split()[1]
