"""Times to first token: everything takes its turn, the first round does not count, medians are kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvlinker.llm import LLM
from kvlinker.research.evaluation import latency
from kvlinker.research.evaluation.latency import first_token_times, time_in_turn
from tests.research.evaluation.conftest import make_example


def test_medians_over_rounds_behind_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    called: list[str] = []
    seconds = {"a": iter([100.0, 3.0, 1.0, 2.0]), "b": iter([100.0, 5.0, 5.0, 50.0])}

    def takes(name: str) -> Callable[[], None]:
        def call() -> None:
            nonlocal clock
            called.append(name)
            clock += next(seconds[name])

        return call

    monkeypatch.setattr(latency.time, "perf_counter", lambda: clock)
    assert time_in_turn({name: takes(name) for name in seconds}, repeat=3) == {"a": 2.0, "b": 5.0}
    assert "".join(called) == "abbaabba"


def test_every_form_under_every_policy(llm: LLM) -> None:
    forms = {"one": make_example(0), "two": make_example(0, passages=("Passage 0.0 tells of something. ",))}
    times = first_token_times(llm, forms, ["full", "naive"], repeat=1)
    assert set(times) == {(form, policy) for form in forms for policy in ("full", "naive")}
    assert min(times.values()) > 0
