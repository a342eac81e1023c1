"""Generates worlds: passages about people, cities and companies, and questions on them.

Nearly all people of a world share its few relations, so that an answer must be bound to its subject
and cannot be guessed from its type. Some passages continue the one before them ("She also ..."):
only those need attention across passages when the passages are read, and their questions have the
kind ``anaphora``. Called by `conversations` for training and by `evaluate` for held-out worlds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from training import prose
from training.entities import Cast, Entity
from training.questions import Kind, Question, World, WorldSettings
from training.relations import BRIDGES, CITY_RELATIONS, COMPANY_RELATIONS, PERSON_RELATIONS, RELATIONS, Relation
from training.tasks import Aged, answer_format, comparisons, example_passage, haystack

_HEADERS = ("Record {n}.", "Note {n}.", "Page {n}.", "From the files.", "Report {n}.", "Archive.")
_LEADS = ("Continued.", "Continued.", "", "", "Further notes.", "More on this.")
_INTRODUCTIONS = (
    "This note is about {s}.",
    "The next pages are about {s}.",
    "Here is what is known about {s}.",
    "{s} is mentioned often.",
    "People talk about {s}.",
)


def build_world(rng: random.Random, settings: WorldSettings, word_budget: int) -> World:
    """Build a world of about `word_budget` words of passages, at least one passage."""
    draw = rng.random()
    if (draw := draw - settings.needle_share) < 0:
        return haystack(Cast(rng, settings), word_budget)
    if (draw := draw - settings.bridge_share) < 0:
        return _WorldBuilder(rng, settings).bridged(word_budget)
    if (draw := draw - settings.place_share) < 0:
        return _WorldBuilder(rng, settings).places(word_budget)
    if (draw := draw - settings.comparison_share) < 0:
        return _WorldBuilder(rng, settings).aged(word_budget)
    if (draw := draw - settings.example_share) < 0:
        return _with_examples(rng, settings, word_budget)
    return _WorldBuilder(rng, settings).plain(word_budget)


def _with_examples(rng: random.Random, settings: WorldSettings, word_budget: int) -> World:
    """Build a world behind examples of how to answer, with all answers in their format."""
    template = answer_format(rng, settings.held_out)
    builder = _WorldBuilder(rng, replace(settings, continued_share=0.0, pronoun_share=0.0))
    examples = example_passage(builder.cast, template, count=2)
    world = builder.plain(word_budget - examples.count(" ") - 1)
    questions = [Question(q.text, template.format(v=q.answer), "fewshot", "") for q in world.questions]
    return World([examples, *world.passages], questions)


@dataclass
class _Unit:
    """Holds passages that stay together: one about an entity, and those that continue it."""

    passages: list[str]
    questions: list[Question]
    values: dict[str, str] = field(default_factory=dict)

    @property
    def words(self) -> int:
        return sum(passage.count(" ") + 1 for passage in self.passages)


class _WorldBuilder:
    """Builds one world: `plain`, `aged`, `places` or `bridged`."""

    def __init__(self, rng: random.Random, settings: WorldSettings) -> None:
        self.rng = rng
        self.settings = settings
        self.cast = Cast(rng, settings)
        self.fillers = rng.randint(0, settings.fillers)

    def plain(self, word_budget: int) -> World:
        """Build a world of people and their facts."""
        people = self._people(self._shared(), word_budget, None)
        return self._world([unit for _, unit in people], [], word_budget)

    def aged(self, word_budget: int) -> World:
        """Build the same; ages are known, and compared."""
        shared = list(dict.fromkeys([RELATIONS["age"], *self._shared()]))[: self.settings.relations]
        people = self._people(shared, word_budget, None)
        aged = [Aged(person, int(unit.values["age"])) for person, unit in people if "age" in unit.values]
        return self._world([unit for _, unit in people], comparisons(self.rng, aged), word_budget)

    def places(self, word_budget: int) -> World:
        """Build a world of cities or companies and their facts, without people."""
        first, relations = self.rng.choice((("home", CITY_RELATIONS), ("employer", COMPANY_RELATIONS)))
        units: list[_Unit] = []
        while sum(unit.words for unit in units) < word_budget and len(units) < self.settings.people:
            place = self.cast.place(self.cast.value(RELATIONS[first]), first)
            if place is not None:
                units.append(self._unit(place, [r for r in relations if self.rng.random() < 0.8] or [relations[0]]))
        return self._world(units, [], word_budget)

    def bridged(self, word_budget: int) -> World:
        """Build a world whose people have homes or employers, about which there are passages too."""
        rng = self.rng
        first = rng.choice(BRIDGES).first
        bridges = [bridge for bridge in BRIDGES if bridge.first == first]
        shared = list(dict.fromkeys([RELATIONS[first], *self._shared()]))[: self.settings.relations]
        units: list[_Unit] = []
        questions: list[Question] = []
        for person, unit in self._people(shared, word_budget, first):
            units.append(unit)
            middle = unit.values.get(first)
            place = self.cast.place(middle, first) if middle is not None else None
            if place is None:
                continue
            stated = rng.sample(bridges, rng.randint(1, len(bridges)))
            place_unit = self._unit(place, [RELATIONS[bridge.second] for bridge in stated])
            units.append(place_unit)
            for bridge in stated:
                text = self.cast.phrase(bridge.questions).format(s=person.name)
                answer = f"{place.name}, {place_unit.values[bridge.second]}"
                questions.append(Question(text, answer, "bridge", ""))
        return self._world(units, questions, word_budget)

    def _shared(self) -> list[Relation]:
        return self.rng.sample(PERSON_RELATIONS, self.settings.relations)

    def _people(self, shared: list[Relation], word_budget: int, bridged: str | None) -> list[tuple[Entity, _Unit]]:
        """Make people with the shared relations, until the budget is used up; half of it for a bridged world."""
        rng = self.rng
        people: list[tuple[Entity, _Unit]] = []
        count = 0
        while len(people) < self.settings.people and (count < word_budget or not people):
            person = self.cast.person()
            relations = [r for r in shared if r.name == bridged or rng.random() < 0.9] or shared[:1]
            if rng.random() < 0.2:
                relations.append(rng.choice(PERSON_RELATIONS))
            unit = self._unit(person, list(dict.fromkeys(relations)))
            people.append((person, unit))
            count += unit.words * 3 // 2 if bridged else unit.words
        return people

    def _world(self, units: list[_Unit], questions: list[Question], word_budget: int) -> World:
        """Put all units in random order, with prose between them where the budget leaves room."""
        rng = self.rng
        questions = [*(q for unit in units for q in unit.questions), *questions]
        missing = word_budget - sum(unit.words for unit in units) - 20
        while missing > 0:
            unit = _Unit([" ".join(self._sentence() for _ in range(rng.randint(2, 5)))], [])
            units.append(unit)
            missing -= unit.words
        rng.shuffle(units)
        return World(self._merge(units), questions)

    def _unit(self, entity: Entity, relations: list[Relation]) -> _Unit:
        """Make the passages and questions that state `relations` of `entity`."""
        rng, settings = self.rng, self.settings
        rng.shuffle(relations)
        cuts = [0, *(i for i in range(1, len(relations)) if rng.random() < settings.continued_share)]
        unit = _Unit([], [])
        if len(relations) == 1 and rng.random() < settings.continued_share:
            introduction = rng.choice(_INTRODUCTIONS).format(s=entity.name)
            unit.passages.append(self._passage([introduction], continued=False))
        for start, end in zip(cuts, [*cuts[1:], len(relations)], strict=True):
            continued = bool(unit.passages)
            sentences: list[str] = []
            for relation in relations[start:end]:
                named = not continued and (not sentences or rng.random() >= settings.pronoun_share)
                value = self.cast.value(relation)
                if named:
                    sentences.append(self.cast.statement(entity.name, relation, value))
                else:
                    sentences.append(self.cast.referring_statement(entity, relation, value, bool(sentences)))
                kind: Kind = "anaphora" if continued else "single" if named else "pronoun"
                cloze = relation.statements[0].split(" {v}")[0].format(s=entity.name)
                unit.questions.append(Question(self.cast.question(entity, relation), value, kind, cloze))
                unit.values[relation.name] = value
            unit.passages.append(self._passage(sentences, continued))
        return unit

    def _sentence(self) -> str:
        return prose.filler_sentence(self.rng, self.settings.library_share)

    def _fillers(self, most: int) -> list[str]:
        return [self._sentence() for _ in range(self.rng.randint(0, most))]

    def _passage(self, facts: list[str], continued: bool) -> str:
        """Make a passage of facts in order with filler around them, and sometimes a header or a lead."""
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

    def _merge(self, units: list[_Unit]) -> list[str]:
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
