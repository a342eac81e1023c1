"""Makes tasks that need more than facts: to compare ages, to answer in a format that is shown, to
find a needle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from kvlinker_lab.training import prose
from kvlinker_lab.training import vocabulary as words
from kvlinker_lab.training.entities import Cast, Entity
from kvlinker_lab.training.questions import Question, World
from kvlinker_lab.training.relations import PERSON_RELATIONS

_GAP = 5  # years; closer ages are not compared
"""The least difference of two compared ages, in years."""

_PER_PERSON = 2  # questions per person of the world
"""The pairs that are tried per person."""

_LABELLED = ("{label}: {v}", "{label} = {v}", "{label} - {v}", "{label} ({v})", "{label}: {v}.")
_BARE = ("({v})", "[{v}]", '"{v}"', "* {v}", "- {v}", "<{v}>", "{v}!", "It is {v}.", "= {v}")
_RARER_BARE = (
    *(
        "{{{v}}}",
        "'{v}'",
        "*{v}*",
        "_{v}_",
        "|{v}|",
        "/{v}/",
        "~{v}~",
        "#{v}",
        "@{v}",
        "> {v}",
        "+ {v}",
        ": {v}",
        "{v};",
    ),
    *(
        "{v}.",
        "{v}?",
        "({v}).",
        "[{v}];",
        "<<{v}>>",
        "(({v}))",
        "[[{v}]]",
        "-{v}-",
        "={v}=",
        "&{v}",
        "%{v}%",
        "${v}",
    ),
)


def _formats(labels: tuple[str, ...], bare: tuple[str, ...]) -> tuple[str, ...]:
    return (
        *(template.replace("{label}", label) for label in labels for template in _LABELLED),
        *bare,
    )


FORMATS = _formats(words.LABELS, _BARE)
"""Formats of answers whose words have tokens of their own; `{v}` stands for the answer."""

_LABELLED_FORMATS: tuple[str, ...] = _formats((*words.LABELS, *words.RARER_LABELS), ())
_BARE_FORMATS: tuple[str, ...] = (*_BARE, *_RARER_BARE)


class Aged(NamedTuple):
    """Holds a person and the age that a world states, in years."""

    person: Entity
    age: int


def comparisons(rng: random.Random, people: Sequence[Aged]) -> list[Question]:
    """Ask about random pairs of people, at most twice as many as there are people."""
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


def answer_format(rng: random.Random, held_out: bool) -> str:
    """Draw a format with a label that training never shows in this form, or one of those that it
    shows."""
    formats = _LABELLED_FORMATS if held_out else (*_LABELLED_FORMATS, *_BARE_FORMATS)
    return rng.choice([f for f in formats if words.is_held_out(f) == held_out])


def labelled_format(rng: random.Random, held_out: bool) -> str:
    """Draw a format with a label, as `answer_format` does."""
    return rng.choice([f for f in _LABELLED_FORMATS if words.is_held_out(f) == held_out])


def example_passage(cast: Cast, template: str, count: int) -> str:
    """Make a passage of questions about people of whom nothing else is said, answered in a
    format."""
    lines = [cast.rng.choice(("Examples:", "Answer like this:", "Use this format:"))]
    for relation in cast.rng.sample(PERSON_RELATIONS, count):
        lines.append(cast.question(cast.person(), relation))
        lines.append(template.format(v=cast.value(relation)))
    return "\n".join(lines)


def haystack(cast: Cast, word_budget: int) -> World:
    """Make a world of about `word_budget` words of prose with needles in it."""
    rng, settings = cast.rng, cast.settings
    count = min(rng.randint(*settings.needles), max(1, word_budget // 20))
    passages: list[list[str]] = []
    length = 0
    while length < word_budget or not passages:
        sentences = [
            prose.filler_sentence(rng, settings.library_share) for _ in range(rng.randint(2, 7))
        ]
        passages.append(sentences)
        length += sum(sentence.count(" ") + 1 for sentence in sentences)
    relations = rng.sample(PERSON_RELATIONS, rng.randint(1, 3))
    questions: list[Question] = []
    for _ in range(count):
        person, relation = cast.person(), rng.choice(relations)
        value = cast.value(relation)
        sentences = rng.choice(passages)
        sentences.insert(
            rng.randint(0, len(sentences)), cast.statement(person.name, relation, value)
        )
        cloze = relation.statements[0].split(" {v}")[0].format(s=person.name)
        questions.append(Question(cast.question(person, relation), value, "needle", cloze))
    return World([" ".join(sentences) for sentences in passages], questions)
