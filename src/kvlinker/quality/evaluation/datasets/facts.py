"""Makes short documents of alike facts, and questions about one of them: an answer that names
another document's person has mixed two."""

from __future__ import annotations

import random
from collections.abc import Iterator

from kvlinker.quality.evaluation.examples import Question

NAME = "facts"

FIRST = (
    *("Clara", "Tobias", "Yusuf", "Helene", "Dmitri", "Rosa", "Anton"),
    *("Leila", "Bruno", "Signe", "Mateo", "Hanna", "Emeka", "Olga"),
)
LAST = (
    *("Varga", "Holm", "Castellano", "Nyberg", "Adeyemi", "Keller"),
    *("Marchetti", "Sorensen", "Bakker", "Ilic", "Faure", "Duda"),
)
CITIES = (
    *("Linz", "Bari", "Uppsala", "Gdansk", "Nantes", "Varna"),
    *("Toledo", "Bremen", "Trieste", "Odense", "Leuven", "Zadar"),
)
KINDS = ("museum", "cinema", "hospital", "library", "observatory", "brewery", "academy", "workshop")
NAMES = (
    *("Amber Gate", "Cedar House", "Silver Lake", "Quiet Harbour", "Falcon Tower", "Copper Bell"),
    *("Willow Court", "Lantern Hill", "Marble Arch", "Winter Garden", "Orchard Hall"),
    "Raven Stone",
)
OTHERS = (
    "Around {n} people work there, most of them from the neighbourhood.",
    "It is closed on Mondays and on the last Friday of each month.",
    "A narrow staircase leads from the entrance to a room with {n} windows.",
    "Visitors can leave their bicycles in the yard behind the main building.",
    "Its heating was replaced two years ago, which took {n} days.",
    "A plaque beside the door remembers the flood that reached the first floor.",
    "In summer, concerts with free entrance take place on the terrace.",
)


LENGTHS = (1, 6)
"""The numbers of further sentences of a document, by which tasks are named: some 45 and 130
tokens."""

EXAMPLES = 100
"""The number of examples of each length."""


def facts(number: int, sentences: int) -> Question:
    """Make four documents of one fact each, at any place among ``sentences`` further sentences, and
    a question about one of them. Equal numbers make equal questions."""
    rng = random.Random(f"{sentences} {number}")
    surnames, names = rng.sample(LAST, 4), rng.sample(NAMES, 4)
    documents = []
    for first, last, name, city in zip(
        rng.sample(FIRST, 4), surnames, names, rng.sample(CITIES, 4), strict=True
    ):
        kind, year = rng.choice(KINDS), rng.randint(1870, 1995)
        fact = f"{first} {last} founded the {kind} {name} in {year}. The {kind} is in {city}."
        text = [other.format(n=rng.randint(4, 60)) for other in rng.sample(OTHERS, sentences)]
        text.insert(rng.randint(0, sentences), fact)
        documents.append(" ".join(text) + "\n\n")
    asked = rng.randrange(4)
    return Question(
        id=str(number),
        dataset=NAME,
        task=f"{NAME}-{sentences}",
        passages=tuple(documents),
        question=f"Question: Who founded {names[asked]}, and where is it? Answer in one sentence.",
        answers=(surnames[asked],),
        metric="names",
        wrong=tuple(name for name in surnames if name != surnames[asked]),
    )


def fact_examples() -> Iterator[Question]:
    """Yield the questions, of the lengths in turn."""
    for number in range(1, EXAMPLES + 1):
        for sentences in LENGTHS:
            yield facts(number, sentences)
