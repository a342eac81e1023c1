"""Says what questions about passages there are, and how hard the worlds are that they are asked about."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Kind = Literal["single", "pronoun", "anaphora", "bridge", "comparison", "fewshot", "needle"]
"""Kinds say where the answer is, or how it has to be given:

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
    """Holds a question, its short answer, its kind, and the start of a sentence that the answer continues.

    `cloze` is empty where no such sentence exists.
    """

    text: str
    answer: str
    kind: Kind
    cloze: str


class World(NamedTuple):
    """Holds passages in reading order, without separators, and the questions they answer."""

    passages: list[str]
    questions: list[Question]


@dataclass(frozen=True)
class WorldSettings:
    """Says how hard a world is to read; shares are probabilities.

    The first five shares choose what a world is about; the rest of the worlds have plain facts only.
    """

    bridge_share: float = 0.2
    """The share of worlds with the cities or employers of their people."""
    place_share: float = 0.12
    """The share of worlds of cities or companies, without people."""
    comparison_share: float = 0.12
    """The share of worlds in which ages are known and compared."""
    example_share: float = 0.12
    """The share of worlds that begin with examples of how to answer."""
    needle_share: float = 0.08
    """The share of worlds of prose with a few facts in it."""
    fillers: int = 2
    """Most sentences of filler on either side of a passage's facts; each world draws its own bound."""
    library_share: float = 0.4
    """The share of filler sentences that come from the library instead of the grammar."""
    phrasings: int = 3
    """The number of wordings in use of each statement and question."""
    relations: int = 2
    """The number of relations that nearly all people of a world share."""
    people: int = 24
    """Most people in a world; what is left of its length is filled with prose."""
    needles: tuple[int, int] = (1, 8)
    """Fewest and most facts of a world of prose."""
    continued_share: float = 0.35
    """The share of facts that stand in a passage of their own, which continues the one before it."""
    pronoun_share: float = 0.5
    """The share of later facts of a passage that refer to their subject by a pronoun."""
    merged_share: float = 0.15
    """The share of passages about two subjects."""
    invented_share: float = 0.05
    """The share of names of random syllables."""
    held_out: bool = False
    """True where all people are from those that never occur in training; else none is."""

    def about(self, kind: Kind) -> WorldSettings:
        """Return settings whose worlds have questions of a kind."""
        plain = replace(self, bridge_share=0.0, comparison_share=0.0, example_share=0.0, needle_share=0.0)
        themes = replace(plain, place_share=0.0)
        match kind:
            case "bridge":
                return replace(themes, bridge_share=1.0)
            case "comparison":
                return replace(themes, comparison_share=1.0)
            case "fewshot":
                return replace(themes, example_share=1.0)
            case "needle":
                return replace(themes, needle_share=1.0, needles=(1, 1))
            case _:
                return plain
