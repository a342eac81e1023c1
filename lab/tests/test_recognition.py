"""The benchmark of recognition tells what is recognised; its figures are not looked at, but for
what is certain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlinker.base.errors import InvalidRequestError
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker_lab.joining import find_template
from kvlinker_lab.recognition import COLUMNS, run_recognition
from tests.toy_models import loaded_model


@pytest.fixture
def subject() -> MeasuredModel:
    return MeasuredModel("llama", "kvlinker bench …", loaded_model("llama"), {})


def questions(folder: Path, count: int = 2) -> str:
    """A file of questions about three passages each, of lines that no other passage has."""
    path = folder / "questions.jsonl"
    with path.open("w") as file:
        for number in range(count):
            contexts = [
                {
                    "title": "",
                    "text": "\n".join(f"{number}{each}{line} is a line." * 2 for line in range(9)),
                }
                for each in "abc"
            ]
            file.write(json.dumps({"ctxs": contexts, "question": "Who?", "answers": ["x"]}) + "\n")
    return str(path)


@pytest.mark.parametrize("template", ["plain", "{question}\n{context}"])
def test_passages_are_recognised(subject: MeasuredModel, tmp_path: Path, template: str) -> None:
    report = run_recognition(
        subject, [questions(tmp_path)], [find_template(template)], limit=2, chunk_tokens=512
    )
    (row,) = report.rows
    assert set(COLUMNS) <= row.keys()
    assert (row["dataset"], row["n"], row["metric"]) == ("questions", 2, "f1")
    assert row["second_sight"] == row["known"] == row["whole"] == 1
    assert row["outside"] == 0
    assert row["tokens"] == pytest.approx(1, abs=0.01)
    assert 0 <= row["joined"] <= 1
    assert row["kl"] >= 0


def test_data_without_questions_is_refused(subject: MeasuredModel, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="prose has no questions"):
        run_recognition(subject, ["prose"], [find_template("plain")], limit=2, chunk_tokens=512)
