"""The prose that ships with kvlinker, and the script that makes it."""

import re

from kvlinker.prompting.encoding import TextEncoder
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker.quality.evaluation.contexts import ContextSplitter
from kvlinker.quality.evaluation.datasets import BUNDLED, load_dataset
from kvlinker.quality.evaluation.examples import Continuation
from kvlinker_lab.training.evaluation_sets import (
    CONTINUATION_CHARACTERS,
    PASSAGE_CHARACTERS,
    PASSAGES,
    continuations,
)
from kvlinker_lab.training.vocabulary import is_held_out

SPLITTER = ContextSplitter(TextEncoder(byte_tokenizer()))
PARAGRAPHS = [f"Paragraph {number} has some words, and then it ends." for number in range(300)]


def test_the_bundled_prose_is_small_and_was_never_read():
    dataset = load_dataset("prose", SPLITTER)
    assert BUNDLED["prose"].stat().st_size < 200_000
    assert 60 <= len(dataset.examples) <= 100
    assert not dataset.skipped
    whole = 0
    for example in dataset.examples:
        assert isinstance(example, Continuation)
        assert len(example.passages) == PASSAGES
        text = "".join(example.passages) + example.continuation
        for paragraph in text.split("\n\n")[1:-1]:  # the others may be cut
            assert is_held_out(paragraph)
            whole += 1
    assert whole > 500


def test_records_are_consecutive_windows_over_the_text():
    records = list(continuations(PARAGRAPHS))
    assert len(records) > 3
    text = ""
    for record in records:
        lengths = [len(part.strip()) for part in (*record["passages"], record["continuation"])]
        assert all(
            PASSAGE_CHARACTERS - 3 <= length < PASSAGE_CHARACTERS + 20 for length in lengths[:-1]
        )
        assert CONTINUATION_CHARACTERS - 3 <= lengths[-1] < CONTINUATION_CHARACTERS + 20
        text += " " + "".join(record["passages"]) + record["continuation"]
    joined = " ".join(PARAGRAPHS)
    assert joined.startswith(re.sub(r"\s+", " ", text).strip())
    assert len(joined) - len(text) < (PASSAGES + 1) * (PASSAGE_CHARACTERS + 20)
    assert [record["id"] for record in records] == [str(number) for number in range(len(records))]


def test_text_that_is_too_short_gives_no_record():
    assert not list(continuations(PARAGRAPHS[:40]))
    assert not list(continuations([]))
