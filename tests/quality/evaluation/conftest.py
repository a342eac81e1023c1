"""A tiny random model with its engine, and examples for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import pytest

from kvlinker.llm import LLM
from kvlinker.quality.evaluation.examples import (
    Continuation,
    Dataset,
    ExampleAnswer,
    ExampleResults,
    Question,
    Scored,
    Skipped,
)
from kvlinker.settings import load_settings
from tests.toy_models import loaded_model

WINDOW = 400

R = TypeVar("R", ExampleAnswer, Scored)


def results_of(outcome: ExampleResults, kind: type[R]) -> list[R]:
    """The results of an example that was not skipped, each of that kind."""
    assert not isinstance(outcome, Skipped), outcome.reason
    results = [result for result in outcome if isinstance(result, kind)]
    assert len(results) == len(outcome)
    return results


def questions_of(dataset: Dataset) -> list[Question]:
    """The examples of a data set of questions only."""
    questions = [example for example in dataset.examples if isinstance(example, Question)]
    assert len(questions) == len(dataset.examples)
    return questions


def make_example(number: int = 0, **changes: object) -> Question:
    fields: dict[str, Any] = {
        "id": str(number),
        "dataset": "toys",
        "task": "odd" if number % 2 else "even",
        "passages": tuple(f"Passage {number}.{i} tells of something. " for i in range(3)),
        "question": f"What of {number}?",
        "answers": ("something",),
        "max_tokens": 6,
    }
    return Question(**(fields | changes))


def make_continuation(number: int = 0, **changes: object) -> Continuation:
    fields: dict[str, Any] = {
        "id": str(number),
        "dataset": "prose",
        "task": "prose",
        "passages": tuple(f"Passage {number}.{i} tells of something" for i in range(3)),
        "continuation": " that goes on without an end.",
    }
    return Continuation(**(fields | changes))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    settings = load_settings(
        state_dir=tmp_path_factory.mktemp("state"),
        kv_slots=4 * WINDOW,
        max_model_len=WINDOW,
        disk_space=0,
        prefix_cache="off",
    )
    with LLM.from_model(loaded_model("llama"), settings) as running:
        yield running
