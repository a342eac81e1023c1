"""Builds worlds: passages about people, cities or companies, and questions about them.

Passages state facts about entities. Some passages continue the one before them ("She also ..."):
only those need attention across passages when the passages are read, and their questions have the
kind ``anaphora``. `worlds` and `hard_worlds` say what goes into a world.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvlinker_lab.training import prose
from kvlinker_lab.training.entities import Cast, Entity
from kvlinker_lab.training.questions import Kind, Question, World, WorldSettings
from kvlinker_lab.training.relations import PERSON_RELATIONS, Relation

_HEADERS = ("Record {n}.", "Note {n}.", "Page {n}.", "From the files.", "Report {n}.", "Archive.")
_LEADS = ("Continued.", "Continued.", "", "", "Further notes.", "More on this.")
_INTRODUCTIONS = (
    "This note is about {s}.",
    "The next pages are about {s}.",
    "Here is what is known about {s}.",
    "{s} is mentioned often.",
    "People talk about {s}.",
)


@dataclass
class Unit:
    """Holds passages that stay together: one about an entity, and those that continue it."""

    passages: list[str]
    questions: list[Question]
    values: dict[str, str] = field(default_factory=dict)
    """The statements about the entity, by the relation's name."""
    after: Unit | None = None
    """The unit that has to come before this one."""

    @property
    def words(self) -> int:
        return sum(passage.count(" ") + 1 for passage in self.passages)


class WorldBuilder:
    """Draws the people and places of one world, and puts what is said about them into passages."""

    def __init__(self, rng: random.Random, settings: WorldSettings) -> None:
        self.rng = rng
        self.settings = settings
        self.cast = Cast(rng, settings)
        self.fillers = rng.randint(0, settings.fillers)

    def draw_shared_relations(self) -> list[Relation]:
        """Draw the relations that nearly all people of the world have."""
        return self.rng.sample(PERSON_RELATIONS, self.settings.relations)

    def people(
        self, shared: list[Relation], word_budget: int, bridged: str | None
    ) -> list[tuple[Entity, Unit]]:
        """Make people with the shared relations, until the budget is used up; half of it for a
        bridged world."""
        rng = self.rng
        people: list[tuple[Entity, Unit]] = []
        count = 0
        while len(people) < self.settings.people and (count < word_budget or not people):
            person = self.cast.person()
            relations = [r for r in shared if r.name == bridged or rng.random() < 0.9] or shared[:1]
            if rng.random() < 0.2:
                relations.append(rng.choice(PERSON_RELATIONS))
            unit = self.unit(person, list(dict.fromkeys(relations)))
            people.append((person, unit))
            count += unit.words * 3 // 2 if bridged else unit.words
        return people

    def world(self, units: list[Unit], questions: list[Question], word_budget: int) -> World:
        """Put all units in random order, with prose between them where the budget leaves room."""
        rng = self.rng
        questions = [*(q for unit in units for q in unit.questions), *questions]
        missing = word_budget - sum(unit.words for unit in units) - 20
        while missing > 0:
            unit = Unit([" ".join(self._sentence() for _ in range(rng.randint(2, 5)))], [])
            units.append(unit)
            missing -= unit.words
        rng.shuffle(units)
        for later, earlier in [(unit, unit.after) for unit in units if unit.after is not None]:
            here, there = (
                next(at for at, unit in enumerate(units) if unit is one) for one in (later, earlier)
            )
            if here < there:
                units[here], units[there] = earlier, later
        return World(self._merge(units), questions)

    def unit(
        self, entity: Entity, relations: list[Relation], given: Mapping[str, str] | None = None
    ) -> Unit:
        """Make the passages and questions that state `relations` of `entity`; `given` has values
        that are not drawn."""
        rng, settings = self.rng, self.settings
        rng.shuffle(relations)
        cuts = [
            0,
            *(i for i in range(1, len(relations)) if rng.random() < settings.continued_share),
        ]
        unit = Unit([], [])
        if len(relations) == 1 and rng.random() < settings.continued_share:
            introduction = rng.choice(_INTRODUCTIONS).format(s=entity.name)
            unit.passages.append(self._passage([introduction], continued=False))
        for start, end in zip(cuts, [*cuts[1:], len(relations)], strict=True):
            continued = bool(unit.passages)
            sentences: list[str] = []
            for relation in relations[start:end]:
                named = not continued and (not sentences or rng.random() >= settings.pronoun_share)
                value = (given or {}).get(relation.name) or self.cast.value(relation)
                if named:
                    sentences.append(self.cast.statement(entity.name, relation, value))
                else:
                    sentences.append(
                        self.cast.referring_statement(entity, relation, value, bool(sentences))
                    )
                kind: Kind = "anaphora" if continued else "single" if named else "pronoun"
                cloze = relation.statements[0].split(" {v}")[0].format(s=entity.name)
                unit.questions.append(
                    Question(self.cast.question(entity, relation), value, kind, cloze)
                )
                unit.values[relation.name] = value
            unit.passages.append(self._passage(sentences, continued))
        return unit

    def _sentence(self) -> str:
        return prose.filler_sentence(self.rng, self.settings.library_share)

    def _fillers(self, most: int) -> list[str]:
        return [self._sentence() for _ in range(self.rng.randint(0, most))]

    def _passage(self, facts: list[str], continued: bool) -> str:
        """Make a passage of facts in order with filler around them, and sometimes a header or a
        lead."""
        rng, most = self.rng, self.fillers
        sentences: list[str] = []
        if continued:
            sentences.append(rng.choice(_LEADS))
            sentences += self._fillers(1) if most and rng.random() < 0.2 else []
        else:
            if rng.random() < 0.2:
                sentences.append(rng.choice(_HEADERS).format(n=rng.randint(1, 99)))
            sentences += self._fillers(most) if rng.random() < 0.5 else []
        for i, fact in enumerate(facts):
            if i and most and rng.random() < 0.15:
                sentences += self._fillers(1)
            sentences.append(fact)
        sentences += self._fillers(most)
        return " ".join(s for s in sentences if s)

    def note(self, text: str) -> str:
        """Make a passage that begins with a text as it is, and goes on with filler."""
        return " ".join([text, *self._fillers(self.fillers)])

    def _merge(self, units: list[Unit]) -> list[str]:
        """Return all passages; sometimes two neighbours without continuations become one."""
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
