"""The set that ships with kvlinker, and the script that makes it."""

import json
import re
from collections import Counter
from itertools import pairwise

from training.evaluation_set import evaluation_set
from training.questions import KINDS
from training.vocabulary import MEN, SURNAMES, WOMEN, is_held_out

from kvlinker.bench.shapes import byte_tokenizer
from kvlinker.evaluation.contexts import ContextSplitter
from kvlinker.evaluation.datasets import BUNDLED, load_dataset
from kvlinker.prompt.encoding import TextEncoder

SPLITTER = ContextSplitter(TextEncoder(byte_tokenizer()))


def test_the_bundled_set_is_small_balanced_and_answerable():
    dataset = load_dataset("reader", SPLITTER)
    assert BUNDLED["reader"].stat().st_size < 1_000_000
    assert not dataset.skipped
    counts = Counter(example.task for example in dataset.examples)
    assert len(counts) >= 4
    assert len(set(counts.values())) == 1
    assert len({example.digest for example in dataset.examples}) == len(dataset.examples)
    first = Counter(example.task for example in dataset.examples[: 2 * len(counts)])
    assert set(first.values()) == {2}
    for example in dataset.examples:
        assert example.metric == "exact_match"
        words = re.findall(r"\w+", " ".join(example.passages) + example.question)
        assert set(re.findall(r"\w+", example.answers[0])) <= set(words)
        assert all(passage.endswith("\n") for passage in example.passages)


def test_the_reader_met_nobody_who_is_asked_about():
    known = set(WOMEN + MEN), set(SURNAMES)
    for example in load_dataset("reader", SPLITTER).examples:
        words = example.question.strip("?.").split()
        for first, last in pairwise(words):
            if first in known[0] and last in known[1]:
                assert is_held_out(f"{first} {last}"), example.question


def test_equal_seeds_make_equal_sets_with_all_kinds_in_turn():
    records = list(evaluation_set(2, (40, 80), seed=3))
    assert records == list(evaluation_set(2, (40, 80), seed=3))
    assert records != list(evaluation_set(2, (40, 80), seed=4))
    assert [record["task"] for record in records] == [*KINDS, *KINDS]
    assert json.loads(json.dumps(records)) == records
