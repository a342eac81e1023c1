"""Builds worlds of every theme: `build_world` draws one.

Called by `conversations` for training and by `evaluate` for held-out worlds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from kvlinker_lab.training.builder import Unit, WorldBuilder
from kvlinker_lab.training.entities import Cast
from kvlinker_lab.training.hard_worlds import (
    chains,
    corrections,
    groups,
    notes,
    records,
    rolls,
    rules,
)
from kvlinker_lab.training.questions import Question, Theme, World, WorldSettings
from kvlinker_lab.training.relations import BRIDGES, CITY_RELATIONS, COMPANY_RELATIONS, RELATIONS
from kvlinker_lab.training.tasks import Aged, answer_format, comparisons, example_passage, haystack

Build = Callable[[random.Random, WorldSettings, int], World]
"""Builds a world of passages. The number is about their words."""


def build_world(rng: random.Random, settings: WorldSettings, word_budget: int) -> World:
    """Build a world of about `word_budget` words of passages, at least one passage."""
    draw = rng.random()
    for theme, share in settings.themes.items():
        draw -= share
        if draw < 0:
            return _THEMES[theme](rng, settings, word_budget)
    return _people(rng, settings, word_budget)


def _haystack(rng: random.Random, settings: WorldSettings, word_budget: int) -> World:
    return haystack(Cast(rng, settings), word_budget)


def _examples(rng: random.Random, settings: WorldSettings, word_budget: int) -> World:
    """Build a world behind examples of how to answer, with all answers in their format."""
    template = answer_format(rng, settings.held_out)
    builder = WorldBuilder(rng, replace(settings, continued_share=0.0, pronoun_share=0.0))
    examples = example_passage(builder.cast, template, count=2)
    world = _plain(builder, word_budget - examples.count(" ") - 1)
    questions = [
        Question(q.text, template.format(v=q.answer), "fewshot", "") for q in world.questions
    ]
    return World([examples, *world.passages], questions)


def _people(rng: random.Random, settings: WorldSettings, word_budget: int) -> World:
    return _plain(WorldBuilder(rng, settings), word_budget)


def _plain(builder: WorldBuilder, word_budget: int) -> World:
    """Build a world of people and their facts."""
    people = builder.people(builder.draw_shared_relations(), word_budget, None)
    return builder.world([unit for _, unit in people], [], word_budget)


def _ages(rng: random.Random, settings: WorldSettings, word_budget: int) -> World:
    """Build the same; ages are known, and compared."""
    builder = WorldBuilder(rng, settings)
    shared = list(dict.fromkeys([RELATIONS["age"], *builder.draw_shared_relations()]))[
        : settings.relations
    ]
    people = builder.people(shared, word_budget, None)
    aged = [
        Aged(person, int(unit.values["age"])) for person, unit in people if "age" in unit.values
    ]
    return builder.world([unit for _, unit in people], comparisons(rng, aged), word_budget)


def _places(rng: random.Random, settings: WorldSettings, word_budget: int) -> World:
    """Build a world of cities or companies and their facts, without people."""
    builder = WorldBuilder(rng, settings)
    first, relations = rng.choice((("home", CITY_RELATIONS), ("employer", COMPANY_RELATIONS)))
    units: list[Unit] = []
    while sum(unit.words for unit in units) < word_budget and len(units) < settings.people:
        place = builder.cast.place(builder.cast.value(RELATIONS[first]), first)
        if place is not None:
            units.append(
                builder.unit(place, [r for r in relations if rng.random() < 0.8] or [relations[0]])
            )
    return builder.world(units, [], word_budget)


def _bridges(rng: random.Random, settings: WorldSettings, word_budget: int) -> World:
    """Build a world whose people have homes or employers, about which there are passages too."""
    builder = WorldBuilder(rng, settings)
    first = rng.choice(BRIDGES).first
    bridges = [bridge for bridge in BRIDGES if bridge.first == first]
    shared = list(dict.fromkeys([RELATIONS[first], *builder.draw_shared_relations()]))[
        : settings.relations
    ]
    units: list[Unit] = []
    questions: list[Question] = []
    for person, unit in builder.people(shared, word_budget, first):
        units.append(unit)
        middle = unit.values.get(first)
        place = builder.cast.place(middle, first) if middle is not None else None
        if place is None:
            continue
        stated = rng.sample(bridges, rng.randint(1, len(bridges)))
        place_unit = builder.unit(place, [RELATIONS[bridge.second] for bridge in stated])
        units.append(place_unit)
        for bridge in stated:
            text = builder.cast.phrase(bridge.questions).format(s=person.name)
            answer = f"{place.name}, {place_unit.values[bridge.second]}"
            questions.append(Question(text, answer, "bridge", ""))
    return builder.world(units, questions, word_budget)


_THEMES: Mapping[Theme, Build] = {
    "haystack": _haystack,
    "bridges": _bridges,
    "places": _places,
    "ages": _ages,
    "examples": _examples,
    "chains": chains,
    "groups": groups,
    "notes": notes,
    "corrections": corrections,
    "rules": rules,
    "rolls": rolls,
    "records": records,
    "people": _people,
}
