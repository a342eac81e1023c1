"""Formats of answers, and passages that show them by example."""

from __future__ import annotations

import random

from training import vocabulary as words
from training.entities import Cast
from training.relations import PERSON_RELATIONS

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
    *("{v}.", "{v}?", "({v}).", "[{v}];", "<<{v}>>", "(({v}))", "[[{v}]]", "-{v}-", "={v}=", "&{v}", "%{v}%", "${v}"),
)


def _formats(labels: tuple[str, ...], bare: tuple[str, ...]) -> tuple[str, ...]:
    return (*(template.replace("{label}", label) for label in labels for template in _LABELLED), *bare)


FORMATS = _formats(words.LABELS, _BARE)
"""Formats of answers whose words have tokens of their own; `{v}` stands for the answer."""

_ALL_FORMATS = (*FORMATS, *_formats(words.RARER_LABELS, _RARER_BARE))


def answer_format(rng: random.Random, held_out: bool) -> str:
    """A format: one of those that training never shows, or one of the others."""
    return rng.choice([f for f in _ALL_FORMATS if words.is_held_out(f) == held_out])


def example_passage(cast: Cast, template: str, count: int) -> str:
    """Questions about people of whom nothing else is said, answered in a format."""
    lines = [cast.rng.choice(("Examples:", "Answer like this:", "Use this format:"))]
    for relation in cast.rng.sample(PERSON_RELATIONS, count):
        lines.append(cast.question(cast.person(), relation))
        lines.append(template.format(v=cast.value(relation)))
    return "\n".join(lines)
