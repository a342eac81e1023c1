"""Relations between entities, with the sentences that state them and the questions about them.

`worlds` draws facts from `PERSON_RELATIONS`, `CITY_RELATIONS` and `COMPANY_RELATIONS`, and two-hop
questions from `BRIDGES`.
"""

from __future__ import annotations

from typing import NamedTuple

from training import vocabulary as words


class Relation(NamedTuple):
    """A relation; `{s}` stands for the subject and `{v}` for the value.

    The first statement and the first question are the canonical ones, used alone at the start of
    training. An empty `values` means that values are entities of the world (see `worlds`).
    """

    name: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]


class Bridge(NamedTuple):
    """A question through an intermediate entity: `second` of (`first` of the subject)."""

    first: str
    second: str
    questions: tuple[str, ...]


PERSON_RELATIONS = (
    Relation(
        "home",
        words.CITIES,
        (
            "{s} lives in {v}.",
            "{s} has a house in {v}.",
            "{s} moved to {v} some years ago and lives there.",
            "The home of {s} is in {v}.",
        ),
        (
            "Where does {s} live?",
            "In which city does {s} live?",
            "What is the home of {s}?",
            "Which city does {s} live in?",
        ),
    ),
    Relation(
        "birthplace",
        words.CITIES,
        (
            "{s} was born in {v}.",
            "{s} comes from {v}.",
            "{s} grew up in {v}, where the family still is.",
        ),
        (
            "Where was {s} born?",
            "In which city was {s} born?",
            "Where does {s} come from?",
            "What is the birthplace of {s}?",
        ),
    ),
    Relation(
        "job",
        words.JOBS,
        (
            "{s} works as a {v}.",
            "{s} is a {v} by trade.",
            "{s} earns a living as a {v}.",
            "{s} became a {v} after school.",
        ),
        (
            "What is the job of {s}?",
            "What does {s} do for a living?",
            "What does {s} work as?",
            "What is {s} by trade?",
        ),
    ),
    Relation(
        "food",
        words.FOODS,
        (
            "{s} likes to eat {v}.",
            "{s} is fond of {v}.",
            "{s} has {v} for dinner every week.",
            "For lunch {s} orders {v}.",
        ),
        (
            "What does {s} like to eat?",
            "What is the favourite food of {s}?",
            "Which food does {s} like?",
            "What does {s} eat?",
        ),
    ),
    Relation(
        "pet",
        words.ANIMALS,
        (
            "{s} keeps a {v}.",
            "{s} has a {v} at home.",
            "{s} looks after a {v}.",
            "{s} bought a {v} last spring.",
        ),
        (
            "Which animal does {s} keep?",
            "What pet does {s} have?",
            "What is the pet of {s}?",
            "Which animal does {s} have?",
        ),
    ),
    Relation(
        "instrument",
        words.INSTRUMENTS,
        (
            "{s} plays the {v}.",
            "{s} practises the {v} every evening.",
            "{s} learned the {v} as a child.",
            "{s} gives lessons on the {v}.",
        ),
        (
            "Which instrument does {s} play?",
            "What does {s} play?",
            "What instrument does {s} play?",
            "What is the instrument of {s}?",
        ),
    ),
    Relation(
        "field",
        words.FIELDS,
        (
            "{s} studies {v}.",
            "{s} reads books about {v}.",
            "{s} took a degree in {v}.",
            "{s} writes about {v}.",
        ),
        (
            "What does {s} study?",
            "Which subject does {s} study?",
            "What is the subject of {s}?",
            "What is the field of {s}?",
        ),
    ),
    Relation(
        "colour",
        words.COLOURS,
        (
            "{s} drives a {v} car.",
            "The car of {s} is {v}.",
            "{s} painted the car {v}.",
        ),
        (
            "What colour is the car of {s}?",
            "Which colour is the car of {s}?",
            "What is the colour of the car of {s}?",
        ),
    ),
    Relation(
        "age",
        words.AGES,
        (
            "{s} is {v} years old.",
            "{s} turned {v} this year.",
            "{s} is aged {v}.",
        ),
        (
            "How old is {s}?",
            "What is the age of {s}?",
            "What age is {s}?",
        ),
    ),
    Relation(
        "employer",
        words.COMPANIES,
        (
            "{s} works for {v}.",
            "{s} is employed by {v}.",
            "{s} has an office at {v}.",
            "{s} joined {v} years ago and never left.",
        ),
        (
            "Which company does {s} work for?",
            "Who does {s} work for?",
            "Where does {s} work?",
            "What is the employer of {s}?",
        ),
    ),
    Relation(
        "mentor",
        (),
        (
            "{s} was taught by {v}.",
            "{s} learned everything from {v}.",
            "The mentor of {s} is {v}.",
        ),
        (
            "Who taught {s}?",
            "Who was {s} taught by?",
            "Who is the mentor of {s}?",
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
            "The river {v} flows through {s}.",
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
        (
            "What is {s} known for?",
            "What is {s} famous for?",
            "What does {s} sell?",
        ),
    ),
    Relation(
        "mayor",
        (),
        (
            "The mayor of {s} is {v}.",
            "{s} is governed by {v}.",
            "{s} elected {v} as its mayor.",
        ),
        (
            "Who is the mayor of {s}?",
            "Who governs {s}?",
            "Who was elected mayor of {s}?",
        ),
    ),
)

COMPANY_RELATIONS = (
    Relation(
        "makes",
        words.PRODUCTS,
        (
            "{s} makes {v}.",
            "{s} produces {v} for export.",
            "{s} earns its money with {v}.",
        ),
        (
            "What does {s} make?",
            "What does {s} produce?",
            "What is the product of {s}?",
        ),
    ),
    Relation(
        "seat",
        words.CITIES,
        (
            "{s} has its head office in {v}.",
            "{s} is based in {v}.",
            "The head office of {s} is in {v}.",
        ),
        (
            "Where is {s} based?",
            "In which city is {s} based?",
            "Where is the head office of {s}?",
        ),
    ),
)

BRIDGES = (
    Bridge(
        "home",
        "river",
        (
            "Which river flows through the city where {s} lives?",
            "On which river does the home of {s} lie?",
        ),
    ),
    Bridge(
        "home",
        "fame",
        (
            "What is the city where {s} lives known for?",
            "What is the home of {s} famous for?",
        ),
    ),
    Bridge(
        "home",
        "mayor",
        (
            "Who is the mayor of the city where {s} lives?",
            "Who governs the home of {s}?",
        ),
    ),
    Bridge(
        "employer",
        "makes",
        (
            "What does the company that {s} works for make?",
            "What does the employer of {s} produce?",
        ),
    ),
    Bridge(
        "employer",
        "seat",
        (
            "Where is the company that {s} works for based?",
            "In which city is the employer of {s} based?",
        ),
    ),
)

RELATIONS = {r.name: r for r in (*PERSON_RELATIONS, *CITY_RELATIONS, *COMPANY_RELATIONS)}
