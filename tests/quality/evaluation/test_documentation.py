"""The page on quality: its example runs, and its record is one."""

import re
from pathlib import Path

import pytest

from kvlinker.prompting.encoding import TextEncoder
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker.quality.evaluation.contexts import ContextSplitter
from kvlinker.quality.evaluation.datasets import load_dataset
from tests.programs import output_of
from tests.quality.evaluation.conftest import questions_of

PAGE = (Path(__file__).parents[3] / "docs" / "quality.md").read_text()


@pytest.mark.whole
def test_the_example_runs(tmp_path, monkeypatch):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.setenv("KVLINKER_STATE_DIR", str(tmp_path))
    full, lego = output_of(program).splitlines()
    assert full == "full exact_match 1.0"
    assert re.fullmatch(r"legolink-4 exact_match [01]\.[0-9]+", lego)


def test_the_record_is_one(tmp_path):
    (record,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.jsonl").write_text(record)
    dataset = load_dataset(
        str(tmp_path / "mine.jsonl"), ContextSplitter(TextEncoder(byte_tokenizer()))
    )
    assert questions_of(dataset)[0].answers == ("1978",)
    assert not dataset.skipped
