"""Data sets that cannot ship with kvlinker, from the folder that KVLINKER_EVALUATION_DATA names."""

import os
from pathlib import Path

import pytest

from kvlinker.prompting.encoding import TextEncoder
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker.quality.evaluation.contexts import ContextSplit, ContextSplitter
from kvlinker.quality.evaluation.datasets import load_dataset
from tests.quality.evaluation.conftest import questions_of

FOLDER = os.environ.get("KVLINKER_EVALUATION_DATA")

pytestmark = pytest.mark.skipif(FOLDER is None, reason="KVLINKER_EVALUATION_DATA names no folder")


@pytest.mark.parametrize("split", list(ContextSplit))
@pytest.mark.parametrize(
    ("name", "metric", "passages"),
    [
        ("musique_s.json", "f1", 10),
        ("samsum.jsonl", "rouge_l", 6),
        ("kv-retrieval-75_keys.jsonl.gz", "exact_match", 15),
        ("essays", "f1", None),
    ],
)
def test_every_file_is_read_without_a_loss(name, metric, passages, split):
    assert FOLDER is not None
    splitter = ContextSplitter(TextEncoder(byte_tokenizer()), split, 2000)
    dataset = load_dataset(str(Path(FOLDER) / name), splitter, limit=12)
    assert len(dataset.examples) == 12
    assert not dataset.skipped
    for example in questions_of(dataset):
        assert example.metric == metric
        if split is ContextSplit.FIXED:
            assert all(
                len(passage.encode()) <= 2100 for passage in example.passages
            )  # 2000, and the needle
        elif passages is not None:
            assert len(example.passages) == passages
        if name != "samsum.jsonl" and name != "musique_s.json":
            assert any(example.answers[0] in passage for passage in example.passages)
