"""Generated worlds: passages about people, cities and companies, and questions on them.

Nearly all people of a world share its few relations, so that an answer must be bound to its subject
and cannot be guessed from its type. Some passages continue the one before them ("She also ..."):
only those need attention across passages when the passages are read, and their questions have the
kind ``anaphora``. Called by `conversations` for training and by `evaluate` for held-out worlds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from training import prose
from training import vocabulary as words
from training.relations import (
    BRIDGES,
    CITY_RELATIONS,
    COMPANY_RELATIONS,
    PERSON_RELATIONS,
    RELATIONS,
    Relation,
)

Kind = Literal["single", "pronoun", "anaphora", "bridge"]
"""Where the answer is: beside the full name; behind a pronoun in the same passage; in a passage
that continues another one; or behind another entity."""

KINDS: tuple[Kind, ...] = ("single", "pronoun", "anaphora", "bridge")

_HEADERS = ("Record {n}.", "Note {n}.", "Page {n}.", "From the files.", "Report {n}.", "Archive.")
_LEADS = ("Continued.", "Continued.", "", "", "Further notes.", "More on this.")


@dataclass(frozen=True)
class WorldSettings:
    """How hard a world is to read.

    Shares are probabilities. `held_out` draws only people whose full names never occur in training.
    """

    fillers: int = 3
    library_share: float = 0.4
    phrasings: int = 4
    relations: int = 2
    continued_share: float = 0.35
    pronoun_share: float = 0.5
    bridge_share: float = 0.4
    merged_share: float = 0.2
    invented_share: float = 0.1
    held_out: bool = False


class Question(NamedTuple):
    """A question, its short answer, where the answer is, and a sentence that the answer continues."""

    text: str
    answer: str
    kind: Kind
    cloze: str


class World(NamedTuple):
    """Passages in reading order, without separators, and the questions they answer."""

    passages: list[str]
    questions: list[Question]


@dataclass(frozen=True)
class Entity:
    """A person, city or company, with the words that refer back to it."""

    name: str
    pronouns: tuple[str, ...]


@dataclass
class _Unit:
    """Passages that stay together: one about an entity, and those that continue it."""

    passages: list[str]
    questions: list[Question]
    entity: Entity
    values: dict[str, str] = field(default_factory=dict)


class WorldBuilder:
    """Builds one world; `build` is the only entry."""

    def __init__(self, rng: random.Random, settings: WorldSettings) -> None:
        self.rng = rng
        self.settings = settings
        self.used: set[str] = set()

    def build(self, word_budget: int) -> World:
        """A world of about `word_budget` words of passages, at least one passage."""
        rng, settings = self.rng, self.settings
        shared = rng.sample(PERSON_RELATIONS, min(settings.relations, len(PERSON_RELATIONS)))
        bridged = rng.random() < settings.bridge_share
        if bridged:
            shared[0] = RELATIONS[rng.choice(("home", "home", "employer"))]
            shared = list(dict.fromkeys(shared))
        first_hop = shared[0].name
        second = rng.choice(CITY_RELATIONS if first_hop == "home" else COMPANY_RELATIONS)

        units: list[_Unit] = []
        bridges: list[Question] = []
        count = 0
        while count < word_budget or not units:
            person = self._person(units)
            relations = [r for r in shared if rng.random() < 0.9] or shared[:1]
            if rng.random() < 0.3:
                relations.append(rng.choice(PERSON_RELATIONS))
            unit = self._unit(person, list(dict.fromkeys(relations)))
            units.append(unit)
            count += _word_count(unit)
            middle = unit.values.get(first_hop)
            if bridged and middle is not None and middle not in self.used:
                self.used.add(middle)
                place = _place(middle, first_hop)
                place_unit = self._unit(place, [second])
                units.append(place_unit)
                count += _word_count(place_unit)
                bridges += self._bridge(person, first_hop, second.name, place_unit.values)
        rng.shuffle(units)
        return World(self._merge(units), [q for unit in units for q in unit.questions] + bridges)

    def _person(self, units: list[_Unit]) -> Entity:
        """A new person; one in six shares a first name or a surname with an earlier one."""
        rng, settings = self.rng, self.settings
        while True:
            woman = rng.random() < 0.5
            first = rng.choice(words.WOMEN if woman else words.MEN)
            last = rng.choice(words.SURNAMES)
            if rng.random() < settings.invented_share:
                last = words.invented_name(rng)
            people = [u.entity for u in units if " " in u.entity.name]
            if people and rng.random() < 0.16:
                other = rng.choice(people)
                if rng.random() < 0.5:
                    last = other.name.split()[1]
                else:
                    first, woman = other.name.split()[0], other.pronouns[0] == "She"
            name = f"{first} {last}"
            if name not in self.used and words.is_held_out(name) == settings.held_out:
                self.used.add(name)
                return Entity(name, ("She" if woman else "He", "The same person", "This person"))

    def _value(self, relation: Relation) -> str:
        """A value for the relation, nearly always one that the world has not used yet."""
        rng = self.rng
        while True:
            if not relation.values:
                pair = rng.choice(words.WOMEN + words.MEN), rng.choice(words.SURNAMES)
                value = " ".join(pair)
            elif relation.values[0][0].isupper() and rng.random() < self.settings.invented_share:
                value = words.invented_name(rng)
            else:
                value = rng.choice(relation.values)
            key = f"{relation.name}:{value}"
            if key not in self.used or rng.random() < 0.1:
                self.used.add(key)
                return value

    def _unit(self, entity: Entity, relations: list[Relation]) -> _Unit:
        """The passages and questions that state `relations` of `entity`."""
        rng, settings = self.rng, self.settings
        rng.shuffle(relations)
        cuts = [0]
        for i in range(1, len(relations)):
            if rng.random() < settings.continued_share:
                cuts.append(i)
        alone_with_name = len(relations) == 1 and rng.random() < settings.continued_share
        unit = _Unit([], [], entity)
        if alone_with_name:
            unit.passages.append(self._introduction(entity))
        for start, end in zip(cuts, [*cuts[1:], len(relations)], strict=True):
            continued = bool(unit.passages)
            sentences: list[str] = []
            for relation in relations[start:end]:
                named = not continued and (not sentences or rng.random() >= settings.pronoun_share)
                value = self._value(relation)
                sentences.append(self._statement(entity, relation, value, named, bool(sentences)))
                kind: Kind = "anaphora" if continued else "single" if named else "pronoun"
                text = self._phrase(relation.questions).format(s=entity.name)
                cloze = relation.statements[0].split(" {v}")[0].format(s=entity.name)
                unit.questions.append(Question(text, value, kind, cloze))
                unit.values[relation.name] = value
            unit.passages.append(self._passage(sentences, continued))
        return unit

    def _introduction(self, entity: Entity) -> str:
        """A passage that names an entity and says nothing that is asked about."""
        text = self.rng.choice(
            (
                "This note is about {s}.",
                "The next pages are about {s}.",
                "Here is what is known about {s}.",
                "{s} is mentioned often.",
                "People talk about {s}.",
            )
        )
        return self._passage([text.format(s=entity.name)], continued=False)

    def _statement(self, entity: Entity, relation: Relation, value: str, named: bool, follows: bool) -> str:
        rng = self.rng
        if named:
            return _sentence(self._phrase(relation.statements), entity.name, value)
        able = [s for s in relation.statements if s.startswith("{s}")]
        subject = rng.choice(entity.pronouns[:1] if follows else entity.pronouns)
        if rng.random() < 0.5:
            subject = entity.pronouns[0]
        return _sentence(self._phrase(tuple(able)), subject, value)

    def _phrase(self, phrasings: tuple[str, ...]) -> str:
        return self.rng.choice(phrasings[: self.settings.phrasings])

    def _fillers(self, most: int) -> list[str]:
        share = self.settings.library_share
        return [prose.filler_sentence(self.rng, share) for _ in range(self.rng.randint(0, most))]

    def _passage(self, facts: list[str], continued: bool) -> str:
        """Facts in order with filler around them, and sometimes a header or a lead."""
        rng, most = self.rng, self.settings.fillers
        sentences: list[str] = []
        if continued:
            sentences.append(rng.choice(_LEADS))
            sentences += self._fillers(1) if most and rng.random() < 0.2 else []
        else:
            if rng.random() < 0.3:
                sentences.append(rng.choice(_HEADERS).format(n=rng.randint(1, 99)))
            sentences += self._fillers(most) if rng.random() < 0.5 else []
        for i, fact in enumerate(facts):
            if i and most and rng.random() < 0.15:
                sentences += self._fillers(1)
            sentences.append(fact)
        sentences += self._fillers(most)
        return " ".join(s for s in sentences if s)

    def _merge(self, units: list[_Unit]) -> list[str]:
        """All passages; sometimes two neighbours without continuations become one."""
        passages: list[str] = []
        mergeable = False
        for unit in units:
            lone = len(unit.passages) == 1
            if lone and mergeable and self.rng.random() < self.settings.merged_share:
                passages[-1] += " " + unit.passages[0]
                mergeable = False
                continue
            passages += unit.passages
            mergeable = lone
        return passages

    def _bridge(self, person: Entity, first: str, second: str, values: dict[str, str]) -> list[Question]:
        for bridge in BRIDGES:
            if (bridge.first, bridge.second) == (first, second):
                text = self._phrase(bridge.questions).format(s=person.name)
                return [Question(text, values[second], "bridge", "")]
        return []


def _sentence(template: str, subject: str, value: str) -> str:
    if value[0] in "aeiou":
        template = template.replace(" a {v}", " an {v}")
    return template.format(s=subject, v=value)


def _place(name: str, relation: str) -> Entity:
    if relation == "home":
        return Entity(name, ("It", "The city", "This city"))
    return Entity(name, ("It", "The company", "This company"))


def _word_count(unit: _Unit) -> int:
    return sum(passage.count(" ") + 1 for passage in unit.passages)
