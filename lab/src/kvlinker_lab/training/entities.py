"""Draws the people, cities and companies of a world, and says things about them."""

from __future__ import annotations

import random
from typing import NamedTuple

from kvlinker_lab.training import vocabulary as words
from kvlinker_lab.training.questions import WorldSettings
from kvlinker_lab.training.relations import Relation


class Entity(NamedTuple):
    """Holds a person, city or company, with the words that refer back to it."""

    name: str
    pronouns: tuple[str, ...]


class Cast:
    """Draws the entities and values of one world, and states facts about them."""

    def __init__(self, rng: random.Random, settings: WorldSettings) -> None:
        self.rng = rng
        self.settings = settings
        self.people: list[Entity] = []
        self._surnames: set[str] = set()
        self._taken: set[str] = set()

    def person(self) -> Entity:
        """Draw a new person; some share the first name of an earlier one, and a few the surname."""
        rng, settings = self.rng, self.settings
        while True:
            woman = rng.random() < 0.5
            first = rng.choice(words.WOMEN if woman else words.MEN)
            last = rng.choice(words.SURNAMES)
            if rng.random() < settings.invented_share:
                last = words.invented_name(rng)
            draw = rng.random()
            if self.people and draw < 0.12:
                other = rng.choice(self.people)
                if draw < 0.02:
                    last = other.name.split()[1]
                else:
                    first, woman = other.name.split()[0], other.pronouns[0] == "She"
            elif last in self._surnames:
                continue
            name = f"{first} {last}"
            if name not in self._taken and words.is_held_out(name) == settings.held_out:
                self._taken.add(name)
                self._surnames.add(last)
                person = Entity(name, ("She" if woman else "He", "The same person", "This person"))
                self.people.append(person)
                return person

    def place(self, name: str, relation: str) -> Entity | None:
        """Draw the city or company that is the value of a relation; None if the world has met
        it."""
        if name in self._taken:
            return None
        self._taken.add(name)
        noun = "city" if relation == "home" else "company"
        return Entity(name, ("It", f"The {noun}", f"This {noun}"))

    def value(self, relation: Relation) -> str:
        """Draw a value for the relation, nearly always one that the world has not used yet."""
        rng = self.rng
        while True:
            value = rng.choice(relation.values)
            if relation.values[0][0].isupper() and rng.random() < self.settings.invented_share:
                value = words.invented_name(rng)
            key = f"{relation.name}:{value}"
            if key not in self._taken or rng.random() < 0.1:
                self._taken.add(key)
                return value

    def phrase(self, phrasings: tuple[str, ...]) -> str:
        """Draw one of the wordings in use."""
        return self.rng.choice(phrasings[: self.settings.phrasings])

    def statement(self, subject: str, relation: Relation, value: str) -> str:
        """Make a sentence that states the relation of a subject, given by name."""
        return _sentence(self.phrase(relation.statements), subject, value)

    def referring_statement(
        self, entity: Entity, relation: Relation, value: str, follows: bool
    ) -> str:
        """Make the same behind a pronoun, or another reference where the sentence before is of
        something else."""
        rng = self.rng
        able = tuple(s for s in relation.statements if s.startswith("{s}"))
        subject = entity.pronouns[0]
        if not follows and rng.random() < 0.5:
            subject = rng.choice(entity.pronouns)
        return _sentence(self.phrase(able), subject, value)

    def question(self, entity: Entity, relation: Relation) -> str:
        """Make a question about the relation of an entity."""
        return self.phrase(relation.questions).format(s=entity.name)


def _sentence(template: str, subject: str, value: str) -> str:
    if value[0] in "aeiou":
        template = template.replace(" a {v}", " an {v}")
    return template.format(s=subject, v=value)
