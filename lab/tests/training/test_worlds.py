"""Worlds: every answer can be derived from the passages, and the kinds are what they claim to
be."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from itertools import product

import pytest

from kvlinker_lab.training import vocabulary as words
from kvlinker_lab.training.questions import ALL_KINDS, Kind, Question, World, WorldSettings
from kvlinker_lab.training.relations import BRIDGES, FRIEND, RELATIONS, Relation
from kvlinker_lab.training.worlds import build_world

SETTINGS = WorldSettings(invented_share=0.0)
WORLDLY = tuple(kind for kind in ALL_KINDS if kind != "call")
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
    """(subject, relation) -> value, read from the text with pronouns resolved to the last subject
    named."""
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


def test_every_kind_is_asked_about(subtests: pytest.Subtests) -> None:
    for kind in WORLDLY:
        with subtests.test(kind):
            assert sum(bool(questions_of(world, kind)) for world in worlds(kind)) >= 20


def test_anaphora_is_never_answered_beside_the_name() -> None:
    for world in worlds("anaphora"):
        for question in questions_of(world, "anaphora"):
            relation, subject = asked_relation(question.text)
            holding = [
                p for p in world.passages if question.answer in facts_in(p, REFERENCE, relation)
            ]
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


def homes_and_friends(world: World) -> tuple[dict[str, str], dict[str, str]]:
    """The city of each person's home, and each person's friend, read from questions that take one
    step."""
    homes: dict[str, str] = {}
    friends: dict[str, str] = {}
    for question in world.questions:
        for relation, found in ((RELATIONS["home"], homes), (FRIEND, friends)):
            for template in relation.questions:
                if name := re.fullmatch(
                    re.escape(template).replace(r"\{s\}", "(.+)"), question.text
                ):
                    found[name[1]] = question.answer
    return homes, friends


def test_chains_name_every_step() -> None:
    for world in worlds("chain"):
        homes, friends = homes_and_friends(world)
        rivers = {s: v for (s, name), v in known_facts(world).items() if name == "river"}
        for question in questions_of(world, "chain"):
            (person,) = re.findall(NAME, question.text)
            steps = [friends[person]]
            if question.text.count("friend") == 2:
                steps.append(friends[steps[0]])
            city = homes[steps[-1]]
            named = [*(name.split()[1] for name in steps), city, rivers[city]]
            assert question.answer == ", ".join(named)


def test_the_same_is_counted() -> None:
    for world in worlds("count"):
        said = known_facts(world)
        for question in questions_of(world, "count"):
            names, count = question.answer.split(": ")
            assert len(names.split(", ")) == int(count)
            (value,) = [
                word for word in re.findall(r"[\w-]+", question.text) if word in said.values()
            ]
            people = {
                subject.split()[1] for (subject, _), stated in said.items() if stated == value
            }
            assert people == set(names.split(", "))


def test_notes_are_ordered_by_their_days() -> None:
    for world in worlds("order"):
        name, day, days = "", "", {}
        for word in re.findall(
            rf"on day \d+|the same day|this day, too|{NAME}", "\n".join(world.passages)
        ):
            if re.fullmatch(NAME, word):
                name = word
            else:
                day = word.split()[2] if word.startswith("on day") else day
                days[name] = day
        for question in questions_of(world, "order"):
            both = re.findall(NAME, question.text)
            told = ", ".join(f"{name.split()[1]} {days[name]}" for name in both)
            assert (
                question.answer
                == f"{told}: {min(both, key=lambda name: int(days[name])).split()[1]}"
            )


def test_the_last_word_stands() -> None:
    for world in worlds("correction"):
        text = "\n".join(world.passages)
        facts = known_facts(world)  # of two, the last
        for question in questions_of(world, "correction"):
            relation, subject = asked_relation(question.text)
            assert facts[subject, relation.name] == question.answer
            assert text.count(subject) > 1


def test_rules_hold_for_whom_they_name() -> None:
    for world in worlds("rule"):
        facts = known_facts(world)
        text = "\n".join(world.passages)
        for question in world.questions:
            relation, subject = asked_relation(question.text)
            value = facts[subject, relation.name]
            assert (question.kind == "rule") == (question.answer != value)
            if question.kind == "rule":
                shown = question.answer.replace(value, "...")
                assert re.search(rf"{subject}[^.]*?:? {re.escape(shown)}", text)


def test_rolls_have_everybody_in_order() -> None:
    for world in worlds("listing"):
        (question,) = questions_of(world, "listing")
        named = list(dict.fromkeys(re.findall(NAME, "\n".join(world.passages))))
        said = set(known_facts(world).values())
        pairs = [one.split(" ") for one in question.answer.split(", ")]
        assert [surname for surname, _ in pairs] == [name.split()[1] for name in named]
        assert all(value in said for _, value in pairs)


def test_records_are_json_of_what_is_known() -> None:
    opened = 0
    for world in worlds("record"):
        facts = known_facts(world)
        for question in questions_of(world, "record"):
            record = json.loads(question.answer)
            (subject,) = re.findall(NAME, question.text)
            known = {name: value for (person, name), value in facts.items() if person == subject}
            assert {str(value) for value in record.values()} <= set(known.values())
            assert question.answer.startswith(question.opening)
            opened += bool(question.opening)
            if not question.opening:
                assert re.findall(r'"(\w+)"', question.text) == list(record)
    assert opened > 10


def test_a_needle_lies_in_prose() -> None:
    for world in worlds("needle"):
        assert len(world.questions) == 1
        assert len(re.findall(NAME, " ".join(world.passages))) == 1


def test_held_out_people_are_apart(subtests: pytest.Subtests) -> None:
    for kind, held_out in product(WORLDLY, (False, True)):
        with subtests.test(kind, held_out=held_out):
            found = set()
            for world in worlds(kind, replace(SETTINGS, held_out=held_out)):
                text = "\n".join((*world.passages, *(q.text for q in world.questions)))
                found |= {words.is_held_out(name) for name in re.findall(NAME, text)}
            assert found == {held_out}


def test_worlds_are_deterministic(subtests: pytest.Subtests) -> None:
    for kind in WORLDLY:
        with subtests.test(kind):
            assert worlds(kind, count=5) == worlds(kind, count=5)
