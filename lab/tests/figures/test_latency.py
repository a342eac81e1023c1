"""Times to first token, by the form of a question and by policy."""

from __future__ import annotations

from kvlinker.llm import LLM
from kvlinker_lab.figures.lab import first_token_times
from tests.quality.evaluation.conftest import llm, make_example

__all__ = ["llm"]


def test_every_form_under_every_policy(llm: LLM) -> None:
    forms = {
        "one": make_example(0),
        "two": make_example(0, passages=("Passage 0.0 tells of something. ",)),
    }
    times = first_token_times(llm, forms, ["full", "naive"], repeat=1)
    assert set(times) == {(form, policy) for form in forms for policy in ("full", "naive")}
    assert min(times.values()) > 0
