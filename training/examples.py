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

_LABELLED_FORMATS: tuple[str, ...] = _formats((*words.LABELS, *words.RARER_LABELS), ())
_BARE_FORMATS: tuple[str, ...] = (*_BARE, *_RARER_BARE)


def answer_format(rng: random.Random, held_out: bool) -> str:
    """A format with a label that training never shows in this form, or one of those that it shows."""
    formats = _LABELLED_FORMATS if held_out else (*_LABELLED_FORMATS, *_BARE_FORMATS)
    return rng.choice([f for f in formats if words.is_held_out(f) == held_out])


def example_passage(cast: Cast, template: str, count: int) -> str:
    """Questions about people of whom nothing else is said, answered in a format."""
    lines = [cast.rng.choice(("Examples:", "Answer like this:", "Use this format:"))]
    for relation in cast.rng.sample(PERSON_RELATIONS, count):
        lines.append(cast.question(cast.person(), relation))
        lines.append(template.format(v=cast.value(relation)))
    return "\n".join(lines)
