"""Lists relations between entities, with the sentences that state them and the questions about
them.

`worlds` draws facts from `PERSON_RELATIONS`, `CITY_RELATIONS` and `COMPANY_RELATIONS`, and two-hop
questions from `BRIDGES`.
"""

from __future__ import annotations

from typing import NamedTuple

from kvlinker_lab.training import vocabulary as words


class Relation(NamedTuple):
    """Describes a relation; `{s}` stands for the subject, which comes first, and `{v}` for the
    value.

    The first statement and the first question are the canonical ones, used alone at the start of
    training.
    """

    name: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]


class Bridge(NamedTuple):
    """Describes a question through an intermediate entity: `second` of (`first` of the subject)."""

    first: str
    second: str
    questions: tuple[str, ...]


PERSON_RELATIONS = (
    Relation(
        "home",
        words.CITIES,
        ("{s} lives in {v}.", "{s} has a house in {v}.", "The home of {s} is in {v}."),
        ("Where does {s} live?", "In which city does {s} live?", "Which city is the home of {s}?"),
    ),
    Relation(
        "job",
        words.JOBS,
        ("{s} works as a {v}.", "{s} is a {v} by trade.", "{s} earns a living as a {v}."),
        ("What is the job of {s}?", "What does {s} do for a living?", "What does {s} work as?"),
    ),
    Relation(
        "food",
        words.FOODS,
        ("{s} likes to eat {v}.", "{s} is fond of {v}.", "{s} has {v} for dinner every week."),
        (
            "What does {s} like to eat?",
            "What is the favourite food of {s}?",
            "Which food does {s} like?",
        ),
    ),
    Relation(
        "pet",
        words.ANIMALS,
        ("{s} keeps a {v}.", "{s} has a {v} at home.", "{s} looks after a {v}."),
        ("Which animal does {s} keep?", "What pet does {s} have?", "What is the pet of {s}?"),
    ),
    Relation(
        "instrument",
        words.INSTRUMENTS,
        (
            "{s} plays the {v}.",
            "{s} practises the {v} every evening.",
            "{s} gives lessons on the {v}.",
        ),
        (
            "Which instrument does {s} play?",
            "What does {s} play?",
            "What is the instrument of {s}?",
        ),
    ),
    Relation(
        "field",
        words.FIELDS,
        ("{s} studies {v}.", "{s} reads books about {v}.", "{s} took a degree in {v}."),
        ("What does {s} study?", "Which subject does {s} study?", "What is the field of {s}?"),
    ),
    Relation(
        "colour",
        words.COLOURS,
        ("{s} drives a {v} car.", "The car of {s} is {v}.", "{s} owns a {v} car."),
        (
            "What colour is the car of {s}?",
            "Which colour is the car of {s}?",
            "What is the colour of the car of {s}?",
        ),
    ),
    Relation(
        "age",
        words.AGES,
        ("{s} is {v} years old.", "{s} turned {v} this year.", "{s} is aged {v}."),
        ("How old is {s}?", "What is the age of {s}?", "What age is {s}?"),
    ),
    Relation(
        "employer",
        words.COMPANIES,
        ("{s} works for {v}.", "{s} is employed by {v}.", "{s} has an office at {v}."),
        (
            "Which company does {s} work for?",
            "Who does {s} work for?",
            "What is the employer of {s}?",
        ),
    ),
)

CITY_RELATIONS = (
    Relation(
        "river",
        words.RIVERS,
        (
            "{s} lies on the river {v}.",
            "{s} was built on the banks of the {v}.",
            "{s} has a bridge over the {v}.",
        ),
        (
            "On which river does {s} lie?",
            "Which river flows through {s}?",
            "What is the river of {s}?",
        ),
    ),
    Relation(
        "fame",
        words.PRODUCTS,
        (
            "{s} is known for {v}.",
            "{s} is famous for its {v}.",
            "{s} sells {v} all over the world.",
        ),
        ("What is {s} known for?", "What is {s} famous for?", "What does {s} sell?"),
    ),
)

COMPANY_RELATIONS = (
    Relation(
        "makes",
        words.PRODUCTS,
        ("{s} makes {v}.", "{s} produces {v} for export.", "{s} earns its money with {v}."),
        ("What does {s} make?", "What does {s} produce?", "What is the product of {s}?"),
    ),
    Relation(
        "emblem",
        words.ANIMALS,
        (
            "{s} has a {v} as its emblem.",
            "{s} chose a {v} for its sign.",
            "The emblem of {s} is a {v}.",
        ),
        (
            "What is the emblem of {s}?",
            "Which animal is the emblem of {s}?",
            "What is on the sign of {s}?",
        ),
    ),
)

BRIDGES = (
    Bridge(
        "home",
        "river",
        (
            "{s} lives in a city. Which river flows through it?",
            "{s} has a house in a city. On which river does it lie?",
        ),
    ),
    Bridge(
        "home",
        "fame",
        (
            "{s} lives in a city. What is it known for?",
            "{s} has a house in a city. What is it famous for?",
        ),
    ),
    Bridge(
        "employer",
        "makes",
        (
            "{s} works for a company. What does it make?",
            "{s} is employed by a company. What does it produce?",
        ),
    ),
    Bridge(
        "employer",
        "emblem",
        (
            "{s} works for a company. What is its emblem?",
            "{s} is employed by a company. What is on its sign?",
        ),
    ),
)

FRIEND = Relation(
    "friend",
    (),
    ("{s} is a friend of {v}.", "{s} often meets {v}.", "{s} writes letters to {v}."),
    ("Who is the friend of {s}?", "Whom does {s} often meet?", "To whom does {s} write letters?"),
)
"""A relation between people; in a world, everybody has one friend at most."""

RELATIONS = {r.name: r for r in (*PERSON_RELATIONS, *CITY_RELATIONS, *COMPANY_RELATIONS)}
