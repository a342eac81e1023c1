"""Formats of answers, and passages that show them by example."""

from __future__ import annotations

import random

from training import vocabulary as words
from training.entities import Cast
from training.relations import PERSON_RELATIONS

_LABELS = ("Answer", "Result", "Found", "Reply", "Value", "Entry", "Fact", "Note", "Output", "Word")
_LABELLED = ("{label}: {v}", "{label} = {v}", "{label} - {v}", "{label} ({v})", "{label}: {v}.")
_BARE = ("({v})", "[{v}]", '"{v}"', "* {v}", "- {v}", "<{v}>", "{v}!", "It is {v}.", "= {v}")

FORMATS = (*(t.replace("{label}", label) for label in _LABELS for t in _LABELLED), *_BARE)
"""Formats of answers; `{v}` stands for the answer."""


def answer_format(rng: random.Random, held_out: bool) -> str:
    """A format: one of those that training never shows, or one of the others."""
    return rng.choice([f for f in FORMATS if words.is_held_out(f) == held_out])


def example_passage(cast: Cast, template: str, count: int) -> str:
    """Questions about people of whom nothing else is said, answered in a format."""
    lines = [cast.rng.choice(("Examples:", "Answer like this:", "Use this format:"))]
    for relation in cast.rng.sample(PERSON_RELATIONS, count):
        lines.append(cast.question(cast.person(), relation))
        lines.append(template.format(v=cast.value(relation)))
    return "\n".join(lines)
