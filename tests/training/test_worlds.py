"""Worlds: every answer can be derived from the passages, and the kinds are what they claim to be."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from training.questions import KINDS, Kind, Question, World, WorldSettings
from training.relations import BRIDGES, RELATIONS, Relation
from training.worlds import build_world

from training import vocabulary as words

SETTINGS = WorldSettings(invented_share=0.0)
NAME = rf"\b(?:{'|'.join((*words.WOMEN, *words.MEN))}) (?:{'|'.join(words.SURNAMES)})\b"


def worlds(kind: Kind, settings: WorldSettings = SETTINGS, count: int = 40) -> list[World]:
    rng = random.Random(f"test/{kind}")
    return [build_world(rng, settings.about(kind), rng.randint(30, 400)) for _ in range(count)]


def questions_of(world: World, kind: Kind) -> list[Question]:
    return [q for q in world.questions if q.kind == kind]


def asked_relation(question: str) -> tuple[Relation, str]:
    """The relation and the subject of a question about a fact."""
    for relation in RELATIONS.values():
        for template in relation.questions:
            if found := re.fullmatch(re.escape(template).replace(r"\{s\}", "(.+)"), question):
                return relation, found[1]
    raise AssertionError(question)


def facts_in(passage: str, subject: str, relation: Relation) -> list[str]:
    """The values that a passage states of a subject, which is a name or a pronoun."""
    values = []
    for template in relation.statements:
        pattern = re.escape(template).replace(r"\ a\ \{v\}", r"\ an?\ \{v\}")
        pattern = pattern.replace(r"\{s\}", rf"\b{subject}").replace(r"\{v\}", r"([\w-]+)")
        values += re.findall(pattern, passage)
    return values


REFERENCE = "(?:She|He|It|(?:The same|This) person|(?:The|This) (?:city|company))"


def known_facts(world: World) -> dict[tuple[str, str], str]:
    """(subject, relation) -> value, read from the text with pronouns resolved to the last subject named."""
    facts: dict[tuple[str, str], str] = {}
    place = rf"\b(?:{'|'.join((*words.CITIES, *words.COMPANIES))})\b"
    subject = {"person": "", "place": ""}
    for sentence in re.split(r"(?<=[.?!:])\s+", "\n".join(world.passages)):
        if found := re.search(NAME, sentence):
            subject["person"] = found[0]
        elif found := re.search(place, sentence):
            subject["place"] = found[0]
        for relation in RELATIONS.values():
            sort = "place" if relation.name in ("river", "fame", "makes", "emblem") else "person"
            for value in facts_in(sentence, f"(?:{NAME}|{place}|{REFERENCE})", relation):
                facts[subject[sort], relation.name] = value
    return facts


@pytest.mark.parametrize("kind", ["single", "pronoun", "anaphora", "needle"])
def test_answers_of_facts_are_stated(kind: Kind) -> None:
    asked = 0
    for world in worlds(kind):
        facts = known_facts(world)
        for question in questions_of(world, kind):
            relation, subject = asked_relation(question.text)
            assert facts[subject, relation.name] == question.answer
            asked += 1
    assert asked >= 20


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_asked_about(kind: Kind) -> None:
    assert sum(bool(questions_of(world, kind)) for world in worlds(kind)) >= 20


def test_anaphora_is_never_answered_beside_the_name() -> None:
    for world in worlds("anaphora"):
        for question in questions_of(world, "anaphora"):
            relation, subject = asked_relation(question.text)
            holding = [p for p in world.passages if question.answer in facts_in(p, REFERENCE, relation)]
            assert any(subject not in passage for passage in holding)


def test_bridges_lead_over_another_entity() -> None:
    for world in worlds("bridge"):
        facts = known_facts(world)
        for question in questions_of(world, "bridge"):
            (subject,) = re.findall(NAME, question.text)
            answers = {
                f"{(middle := facts[subject, bridge.first])}, {facts[middle, bridge.second]}"
                for bridge in BRIDGES
                if question.text in (text.format(s=subject) for text in bridge.questions)
            }
            assert answers == {question.answer}


def test_comparisons_follow_from_the_ages() -> None:
    for world in worlds("comparison"):
        facts = known_facts(world)
        for question in questions_of(world, "comparison"):
            first, second = re.findall(NAME, question.text)
            order = sorted((first, second), key=lambda name: int(facts[name, "age"]))
            ages = ", ".join(f"{name.split()[1]} {facts[name, 'age']}" for name in (first, second))
            assert question.answer == f"{ages}: {facts[order['older' in question.text], 'age']}"


def test_examples_show_the_format_of_the_answers() -> None:
    for world in worlds("fewshot"):
        facts = known_facts(World(world.passages[1:], []))
        _, _, shown, _, again = world.passages[0].split("\n")
        for question in world.questions:
            relation, subject = asked_relation(question.text)
            value = facts[subject, relation.name]
            before, after = question.answer.split(value)
            for line in (shown, again):
                assert line.startswith(before)
                assert line.endswith(after)


def test_a_needle_lies_in_prose() -> None:
    for world in worlds("needle"):
        assert len(world.questions) == 1
        assert len(re.findall(NAME, " ".join(world.passages))) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held_out", [False, True])
def test_held_out_people_are_apart(kind: Kind, held_out: bool) -> None:
    found = set()
    for world in worlds(kind, replace(SETTINGS, held_out=held_out)):
        text = "\n".join((*world.passages, *(q.text for q in world.questions)))
        found |= {words.is_held_out(name) for name in re.findall(NAME, text)}
    assert found == {held_out}


@pytest.mark.parametrize("kind", KINDS)
def test_worlds_are_deterministic(kind: Kind) -> None:
    assert worlds(kind, count=5) == worlds(kind, count=5)
