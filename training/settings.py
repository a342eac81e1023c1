"""How hard generated worlds are to read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from training.questions import Kind


@dataclass(frozen=True)
class WorldSettings:
    """How hard a world is to read; shares are probabilities.

    The first five shares choose what a world is about; the rest of the worlds have plain facts only.
    """

    bridge_share: float = 0.2
    """Worlds with the cities or employers of their people."""
    place_share: float = 0.12
    """Worlds of cities or companies, without people."""
    comparison_share: float = 0.12
    """Worlds in which ages are known and compared."""
    example_share: float = 0.12
    """Worlds that begin with examples of how to answer."""
    needle_share: float = 0.08
    """Worlds of prose with a few facts in it."""
    fillers: int = 2
    """Most sentences of filler on either side of a passage's facts; each world draws its own bound."""
    library_share: float = 0.4
    """Filler sentences from the library instead of the grammar."""
    phrasings: int = 3
    """Wordings in use of each statement and question."""
    relations: int = 2
    """Relations that nearly all people of a world share."""
    people: int = 24
    """Most people in a world; what is left of its length is filled with prose."""
    needles: tuple[int, int] = (1, 8)
    """Fewest and most facts of a world of prose."""
    continued_share: float = 0.35
    """Facts that stand in a passage of their own, which continues the one before it."""
    pronoun_share: float = 0.5
    """Later facts of a passage that refer to their subject by a pronoun."""
    merged_share: float = 0.15
    """Passages about two subjects."""
    invented_share: float = 0.05
    """Names of random syllables."""
    held_out: bool = False
    """Whether all people are from those that never occur in training, or none is."""

    def about(self, kind: Kind) -> WorldSettings:
        """Settings whose worlds have questions of a kind."""
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
