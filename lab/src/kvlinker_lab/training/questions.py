"""Says what questions about passages there are, and how hard the worlds are that they are asked
about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

Kind = Literal[
    "single", "pronoun", "anaphora", "bridge", "comparison", "fewshot", "needle",
    "chain", "count", "order", "correction", "rule", "listing", "record", "call",
]  # fmt: skip
"""Kinds say where the answer is, or how it has to be given:

- ``single``: beside the full name of the subject;
- ``pronoun``: behind a pronoun in the passage that names the subject;
- ``anaphora``: in a passage that continues another one and does not name the subject;
- ``bridge``: behind another entity, such as the river of the city where somebody lives; the answer
  names both ("Lisbon, Tagus");
- ``comparison``: the age of the older or younger of two people, whose ages are stated in two
  places; the answer names both first ("Holt 61, Berg 30: 61");
- ``fewshot``: beside the full name, to be given in the format of examples that come first;
- ``needle``: in one sentence within prose about other things;
- ``chain``: three or four steps away, over one friend or two; the answer names every step
  ("Berg, Lisbon, Tagus");
- ``count``: the number of people of whom the same is said; the answer names them first ("Holt,
  Berg: 2");
- ``order``: which of two people something was noted of first, by the days of the notes; a note that
  continues another is of the same day ("Holt 12, Berg 40: Holt");
- ``correction``: in a later passage that corrects an earlier one;
- ``rule``: beside the full name, in a form that a passage elsewhere prescribes for this person
  alone;
- ``listing``: all over the passages: what is said of each person ("Holt Varna, Berg Lisbon");
- ``record``: beside or behind the full name, as a JSON object;
- ``call``: in no passage: a tool has to be called, or what it returned has to be told.
"""

KINDS: tuple[Kind, ...] = (
    "single",
    "pronoun",
    "anaphora",
    "bridge",
    "comparison",
    "fewshot",
    "needle",
)
"""The kinds that papers ask about, more or less."""

HARD_KINDS: tuple[Kind, ...] = ("chain", "order", "correction", "rule")
"""The kinds that need several passages, each for another reason, and that the reader has
learned."""

WORLD_KINDS: tuple[Kind, ...] = (*KINDS, *HARD_KINDS, "count", "listing", "record")
"""The kinds that worlds have questions of."""

ALL_KINDS: tuple[Kind, ...] = (*WORLD_KINDS, "call")

Theme = Literal[
    "haystack", "bridges", "places", "ages", "examples", "chains", "groups", "notes", "corrections",
    "rules",
    "rolls", "records", "people",
]  # fmt: skip
"""The theme of a world: ``people`` has plain facts only."""


class Question(NamedTuple):
    """Holds a question, its short answer, its kind, and the start of a sentence that the answer
    continues.

    `cloze` is empty where no such sentence exists.
    """

    text: str
    answer: str
    kind: Kind
    cloze: str
    opening: str = ""
    """The beginning of the answer that a grammar forces, and that is not learned."""


class World(NamedTuple):
    """Holds passages in reading order, without separators, and the questions they answer."""

    passages: list[str]
    questions: list[Question]


@dataclass(frozen=True)
class WorldSettings:
    """The difficulty of a world; shares are probabilities."""

    themes: Mapping[Theme, float] = field(default_factory=lambda: USUAL_THEMES)
    """The shares of worlds with these themes; the rest have plain facts only."""
    fillers: int = 2
    """Most sentences of filler on either side of a passage's facts; each world draws its own
    bound."""
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
    """The share of facts that stand in a passage of their own, which continues the one before
    it."""
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
        settings = replace(
            self, themes=_THEMES_OF.get(kind, {"places": self.themes.get("places", 0.0)})
        )
        return replace(settings, needles=(1, 1)) if kind == "needle" else settings


USUAL_THEMES: Mapping[Theme, float] = {
    "haystack": 0.08,
    "bridges": 0.2,
    "places": 0.12,
    "ages": 0.12,
    "examples": 0.12,
}

_THEMES_OF: Mapping[Kind, Mapping[Theme, float]] = {
    "bridge": {"bridges": 1.0},
    "comparison": {"ages": 1.0},
    "fewshot": {"examples": 1.0},
    "needle": {"haystack": 1.0},
    "chain": {"chains": 1.0},
    "count": {"groups": 1.0},
    "order": {"notes": 1.0},
    "correction": {"corrections": 1.0},
    "rule": {"rules": 1.0},
    "listing": {"rolls": 1.0},
    "record": {"records": 1.0},
}
