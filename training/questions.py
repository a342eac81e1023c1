"""What a question about passages is, and the kinds of questions that are told apart."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["single", "pronoun", "anaphora", "bridge", "comparison", "fewshot", "needle"]
"""Where the answer is, or how it has to be given:

- ``single``: beside the full name of the subject;
- ``pronoun``: behind a pronoun in the passage that names the subject;
- ``anaphora``: in a passage that continues another one and does not name the subject;
- ``bridge``: behind another entity, such as the river of the city where somebody lives; the answer
  names both ("Lisbon, Tagus");
- ``comparison``: the age of the older or younger of two people, whose ages are stated in two places;
  the answer names both first ("Holt 61, Berg 30: 61");
- ``fewshot``: beside the full name, to be given in the format of examples that come first;
- ``needle``: in one sentence within prose about other things.
"""

KINDS: tuple[Kind, ...] = ("single", "pronoun", "anaphora", "bridge", "comparison", "fewshot", "needle")


class Question(NamedTuple):
    """A question, its short answer, its kind, and the start of a sentence that the answer continues.

    `cloze` is empty where no such sentence exists.
    """

    text: str
    answer: str
    kind: Kind
    cloze: str


class World(NamedTuple):
    """Passages in reading order, without separators, and the questions they answer."""

    passages: list[str]
    questions: list[Question]
