"""Builds worlds whose questions need several passages: chains, groups, notes, corrections, rules,
rolls and records."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvlinker_lab.training.builder import Unit, WorldBuilder
from kvlinker_lab.training.entities import Entity
from kvlinker_lab.training.questions import Kind, Question, World, WorldSettings
from kvlinker_lab.training.relations import CITY_RELATIONS, FRIEND, PERSON_RELATIONS, RELATIONS
from kvlinker_lab.training.tasks import labelled_format

_MOST_NAMED = 4  # people in one answer
"""The most people that share a value, so that an answer names all of them."""

_DAYS = range(1, 91)

_FRIENDS_RIVER = (
    "{s} has a friend, who lives in a city. Which river flows through it?",
    "The friend of {s} lives in a city. On which river does it lie?",
)
_FRIENDS_FRIENDS_RIVER = (
    "The friend of {s} has a friend, who lives in a city. Which river flows through it?",
    "{s} has a friend, whose friend lives in a city. On which river does it lie?",
)
_FRIENDS_HOME = (
    "In which city does the friend of {s} live?",
    "{s} has a friend. Where does this friend live?",
)

_PLURAL = {
    "home": ("live in {v}", "Where does everybody live?"),
    "job": ("work as a {v}", "What is everybody's job?"),
    "food": ("like to eat {v}", "What does everybody like to eat?"),
    "pet": ("keep a {v}", "Which animal does everybody keep?"),
    "instrument": ("play the {v}", "Which instrument does everybody play?"),
    "field": ("study {v}", "What does everybody study?"),
    "colour": ("drive a {v} car", "What colour is everybody's car?"),
    "employer": ("work for {v}", "Who does everybody work for?"),
}
"""Phrases about several people and questions about all of them, by relation."""

_CORRECTIONS = (
    "Correction. {statement}",
    "What was said of {s} is no longer true. {statement}",
    "Newer note. {statement}",
    "This has changed. {statement}",
)
_RULES = (
    "Rule. Answers about {s} look like this: {shown}",
    "Whenever {s} is asked about, answer in this form: {shown}",
    "Note for readers. Write answers about {s} so: {shown}",
)
_NOTED = (
    "This was noted on day {day}.",
    "It was written down on day {day}.",
    "Noted on day {day}.",
)
_ALSO = (
    "This was noted on the same day.",
    "It was written down on the same day.",
    "Noted on this day, too.",
)


class _Known(NamedTuple):
    """Holds a person and the passages about it."""

    person: Entity
    unit: Unit

    @property
    def surname(self) -> str:
        return self.person.name.split()[1]


def chains(rng: random.Random, settings: WorldSettings, word_budget: int) -> World:
    """Build a world of friends, their homes, and the rivers of these: answers are three or four
    steps away."""
    builder = WorldBuilder(rng, settings)
    people = _persons(builder, rng.randint(3, 6), word_budget // 3)
    river, home = CITY_RELATIONS[0], RELATIONS["home"]
    known: list[_Known] = []
    units: list[Unit] = []
    rivers: dict[str, str] = {}
    for person, friend in zip(people, (*people[1:], people[0]), strict=True):
        unit = builder.unit(person, [FRIEND, home], {FRIEND.name: friend.name})
        known.append(_Known(person, unit))
        units.append(unit)
        city = builder.cast.place(unit.values["home"], "home")
        if city is not None:
            place = builder.unit(city, [river])
            rivers[city.name] = place.values["river"]
            units.append(place)
    questions: list[Question] = []
    for at, (person, _) in enumerate(known):
        one, another = (known[(at + steps) % len(known)] for steps in (1, 2))
        text = builder.cast.phrase(_FRIENDS_HOME).format(s=person.name)
        home_of_one = one.unit.values["home"]
        questions.append(Question(text, f"{one.surname}, {home_of_one}", "bridge", ""))
        for phrases, steps in ((_FRIENDS_RIVER, [one]), (_FRIENDS_FRIENDS_RIVER, [one, another])):
            last = steps[-1].unit.values["home"]
            if last in rivers:
                named = ", ".join([*(step.surname for step in steps), last, rivers[last]])
                questions.append(
                    Question(builder.cast.phrase(phrases).format(s=person.name), named, "chain", "")
                )
    return builder.world(units, questions, word_budget)


def groups(rng: random.Random, settings: WorldSettings, word_budget: int) -> World:
    """Build a world in which the same is said of several people, who are counted."""
    builder = WorldBuilder(rng, settings)
    relation = RELATIONS[rng.choice(list(_PLURAL))]
    values = [builder.cast.value(relation) for _ in range(rng.randint(2, 3))]
    other = rng.choice(PERSON_RELATIONS)
    known: list[_Known] = []
    for person in _persons(builder, rng.randint(3, 6), word_budget):
        value = rng.choice(values)
        if sum(one.unit.values[relation.name] == value for one in known) < _MOST_NAMED:
            relations = [relation] if other == relation or rng.random() < 0.5 else [relation, other]
            known.append(_Known(person, builder.unit(person, relations, {relation.name: value})))
    world = builder.world([unit for _, unit in known], [], word_budget)
    ordered = _in_order(known, world)
    for value in dict.fromkeys(one.unit.values[relation.name] for one in ordered):
        named = [one.surname for one in ordered if one.unit.values[relation.name] == value]
        text = f"How many people {_PLURAL[relation.name][0].format(v=value)}?"
        if value[0] in "aeiou":
            text = text.replace(" a ", " an ")
        world.questions.append(Question(text, f"{', '.join(named)}: {len(named)}", "count", ""))
    return world


def notes(rng: random.Random, settings: WorldSettings, word_budget: int) -> World:
    """Build a world of dated notes: who was noted first is asked."""
    builder = WorldBuilder(rng, settings)
    days = rng.sample(_DAYS, rng.randint(2, 6))
    noted: list[tuple[Entity, int]] = []
    units: list[Unit] = []
    relation = rng.choice(PERSON_RELATIONS)
    for day in days:
        if noted and sum(unit.words for unit in units) > word_budget:
            break
        unit = Unit([], [])
        for continued in (False, True) if rng.random() < settings.continued_share else (False,):
            person = builder.cast.person()
            value = builder.cast.value(relation)
            noted_on = rng.choice(_ALSO) if continued else rng.choice(_NOTED).format(day=day)
            unit.passages.append(
                builder.note(f"{builder.cast.statement(person.name, relation, value)} {noted_on}")
            )
            kind: Kind = "anaphora" if continued else "single"
            unit.questions.append(
                Question(f"On which day was {person.name} noted?", str(day), kind, "")
            )
            unit.questions.append(
                Question(builder.cast.question(person, relation), value, "single", "")
            )
            noted.append((person, day))
        units.append(unit)
    questions: list[Question] = []
    for _ in range(2 * len(noted) if len(noted) > 1 else 0):
        (first, one), (second, other) = rng.sample(noted, 2)
        surnames = [person.name.split()[1] for person in (first, second)]
        if one != other and surnames[0] != surnames[1]:
            text = f"Who was noted first, {first.name} or {second.name}?"
            answer = f"{surnames[0]} {one}, {surnames[1]} {other}: {surnames[one > other]}"
            questions.append(Question(text, answer, "order", ""))
    return builder.world(units, list(dict.fromkeys(questions)), word_budget)


def corrections(rng: random.Random, settings: WorldSettings, word_budget: int) -> World:
    """Build a world of people, some facts about whom are corrected later: the last word stands."""
    builder = WorldBuilder(rng, settings)
    units: list[Unit] = []
    for person, unit in builder.people(builder.draw_shared_relations(), word_budget * 2 // 3, None):
        units.append(unit)
        if rng.random() < 0.6:
            relation = RELATIONS[rng.choice(list(unit.values))]
            value = builder.cast.value(relation)
            statement = builder.cast.statement(person.name, relation, value)
            said = rng.choice(_CORRECTIONS).format(s=person.name, statement=statement)
            wrong = [q for q in unit.questions if q.answer == unit.values[relation.name]]
            unit.questions[:] = [q for q in unit.questions if q not in wrong]
            question = Question(builder.cast.question(person, relation), value, "correction", "")
            units.append(Unit([builder.note(said)], [question], after=unit))
    return builder.world(units, [], word_budget)


def rules(rng: random.Random, settings: WorldSettings, word_budget: int) -> World:
    """Build a world in which a passage prescribes the form of answers about one person or two."""
    builder = WorldBuilder(rng, replace(settings, continued_share=0.0, pronoun_share=0.0))
    known = builder.people(builder.draw_shared_relations(), word_budget * 4 // 5, None)
    units = [unit for _, unit in known]
    for person, unit in rng.sample(known, min(len(known), rng.randint(1, 2))):
        template = labelled_format(rng, settings.held_out)
        said = rng.choice(_RULES).format(s=person.name, shown=template.format(v="..."))
        units.append(Unit([said], []))
        unit.questions[:] = [
            Question(q.text, template.format(v=q.answer), "rule", "") for q in unit.questions
        ]
    return builder.world(units, [], word_budget)


def rolls(rng: random.Random, settings: WorldSettings, word_budget: int) -> World:
    """Build a world of a few people: what is said of each of them is asked at once."""
    builder = WorldBuilder(rng, settings)
    relation = RELATIONS[rng.choice(list(_PLURAL))]
    other = rng.choice(PERSON_RELATIONS)
    relations = [relation] if other == relation else [relation, other]
    people = _persons(builder, rng.randint(2, _MOST_NAMED), word_budget)
    known = [_Known(person, builder.unit(person, list(relations))) for person in people]
    world = builder.world([unit for _, unit in known], [], word_budget)
    ordered = _in_order(known, world)
    answer = ", ".join(f"{one.surname} {one.unit.values[relation.name]}" for one in ordered)
    world.questions.append(Question(_PLURAL[relation.name][1], answer, "listing", ""))
    return world


def records(rng: random.Random, settings: WorldSettings, word_budget: int) -> World:
    """Build a world of people whose facts are asked for as JSON objects."""
    builder = WorldBuilder(rng, replace(settings, relations=rng.randint(1, 3)))
    known = [
        _Known(*one) for one in builder.people(builder.draw_shared_relations(), word_budget, None)
    ]
    questions: list[Question] = []
    for person, unit in known:
        asked = list(unit.values)
        rng.shuffle(asked)
        questions.append(_record(rng, person, {name: unit.values[name] for name in asked}))
        for question in unit.questions:
            key = rng.choice(
                (
                    "answer",
                    "value",
                    "result",
                    *(n for n, v in unit.values.items() if v == question.answer),
                )
            )
            questions.append(_one_value(rng, question, key))
    return builder.world([unit for _, unit in known], questions, word_budget)


def _record(rng: random.Random, person: Entity, values: dict[str, str]) -> Question:
    """Ask for all that is known of a person."""
    keys = [f'"{name}"' for name in values]
    named = (
        f"the key {keys[0]}"
        if len(keys) == 1
        else f"the keys {', '.join(keys[:-1])} and {keys[-1]}"
    )
    text = rng.choice(
        (
            f"Describe {person.name} as JSON with {named}.",
            f"Who is {person.name}? Answer as JSON with {named}.",
        )
    )
    return Question(text, _json(values), "record", "")


def _one_value(rng: random.Random, question: Question, key: str) -> Question:
    """Ask for the same as JSON: in words, or by an opening alone, as where a schema is enforced."""
    answer = _json({key: question.answer})
    if rng.random() < 0.5:
        return Question(
            f'{question.text} Answer as JSON with the key "{key}".', answer, "record", ""
        )
    opening = answer[: answer.index(question.answer)].rstrip(" ")
    return Question(question.text, answer, "record", "", opening)


def _json(values: dict[str, str]) -> str:
    return json.dumps(
        {name: int(value) if value.isdecimal() else value for name, value in values.items()}
    )


def _persons(builder: WorldBuilder, count: int, word_budget: int) -> list[Entity]:
    """Draw people with surnames of their own, fewer where the budget has less than ten words for
    each, but two."""
    people: list[Entity] = []
    while len(people) < max(2, min(count, word_budget // 10)):
        person = builder.cast.person()
        if person.name.split()[1] not in [other.name.split()[1] for other in people]:
            people.append(person)
    return people


def _in_order(known: Sequence[_Known], world: World) -> list[_Known]:
    """Put people into the order in which the passages name them first."""
    text = "\n".join(world.passages)
    return sorted(known, key=lambda one: text.index(one.person.name))
