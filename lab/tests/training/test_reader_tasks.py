"""The sets that ship with kvlinker, and the script that makes them."""

import gzip
import json
import re
from collections import Counter
from itertools import pairwise

import pytest

from kvlinker.prompting.encoding import TextEncoder
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker.quality.evaluation.contexts import ContextSplitter
from kvlinker.quality.evaluation.datasets import BUNDLED, load_dataset
from kvlinker_lab.training.evaluation_sets import BUNDLED as GENERATED
from kvlinker_lab.training.evaluation_sets import SEED, Bundled, evaluation_set, rivals
from kvlinker_lab.training.questions import KINDS, Kind, Question
from kvlinker_lab.training.vocabulary import MEN, SURNAMES, WOMEN, is_held_out
from tests.quality.evaluation.conftest import questions_of

SPLITTER = ContextSplitter(TextEncoder(byte_tokenizer()))


@pytest.mark.parametrize("name", GENERATED)
def test_the_files_are_what_the_script_writes(name: str):
    records = gzip.decompress(BUNDLED[name].read_bytes()).decode().splitlines()
    assert [json.loads(record) for record in records] == list(evaluation_set(GENERATED[name], SEED))


@pytest.mark.parametrize("name", GENERATED)
def test_the_bundled_sets_are_small_balanced_and_answerable(name: str):
    dataset = load_dataset(name, SPLITTER)
    assert BUNDLED[name].stat().st_size < 1_000_000
    assert not dataset.skipped
    counts = Counter(example.task for example in dataset.examples)
    assert len(counts) >= 4
    assert len(set(counts.values())) == 1
    assert len({example.digest for example in dataset.examples}) == len(dataset.examples)
    first = Counter(example.task for example in dataset.examples[: 2 * len(counts)])
    assert set(first.values()) == {2}
    for example in questions_of(dataset):
        assert example.metric == "exact_match"
        words = re.findall(r"\w+", " ".join(example.passages) + example.question)
        said, _, count = (
            example.answers[0].partition(": ")
            if example.task == "count"
            else (example.answers[0], "", "0")
        )
        assert set(re.findall(r"\w+", said)) <= set(words)
        assert int(count) == len(said.split(", ")) or example.task != "count"
        assert all(passage.endswith("\n") for passage in example.passages)


@pytest.mark.parametrize("name", GENERATED)
def test_the_reader_met_nobody_who_is_asked_about(name: str):
    known = set(WOMEN + MEN), set(SURNAMES)
    for example in questions_of(load_dataset(name, SPLITTER)):
        words = example.question.strip("?.").split()
        for first, last in pairwise(words):
            if first in known[0] and last in known[1]:
                assert is_held_out(f"{first} {last}"), example.question


def test_equal_seeds_make_equal_sets_with_all_kinds_in_turn():
    described = Bundled(KINDS, 2, (40, 80))
    records = list(evaluation_set(described, seed=3))
    assert records == list(evaluation_set(described, seed=3))
    assert records != list(evaluation_set(described, seed=4))
    assert [record["task"] for record in records] == [*KINDS, *KINDS]
    assert json.loads(json.dumps(records)) == records


def asked(text: str, answer: str, kind: Kind = "bridge") -> Question:
    return Question(text, answer, kind, cloze="")


def test_rivals_answer_the_same_question_about_others():
    question = asked("Ann Low lives in a city. What is it known for?", "Riga, lamps")
    others = [
        question,
        asked("Bob High lives in a city. What is it known for?", "Oslo, soap"),
        asked("Cid Broad lives in a city. What is it known for?", "Riga, lamps"),
        asked("Bob High has a house in a city. Which river flows through it?", "Oslo, Don"),
    ]
    assert rivals(question, others) == ["Oslo, soap"]


def test_the_rival_of_a_comparison_exchanges_ages():
    question = asked(
        "What is the age of the older one, Ann Low or Bob High?",
        "Low 40, High 26: 40",
        "comparison",
    )
    assert rivals(question, []) == ["Low 26, High 40: 40"]
    assert rivals(question._replace(answer="Low 40, High 40: 40"), []) == []


def test_choices_hold_the_answer_and_another_one():
    for example in questions_of(load_dataset("reader-choice", SPLITTER)):
        assert len(set(example.choices)) == 2
        assert set(example.answers) < set(example.choices)
    assert not any(example.choices for example in questions_of(load_dataset("reader", SPLITTER)))
