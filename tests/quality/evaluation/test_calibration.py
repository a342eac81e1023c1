"""The setting that is chosen is the cheapest one that is good enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvlinker.base.errors import InvalidRequestError, PolicyError
from kvlinker.quality.evaluation.calibration import calibrate, candidates_of, trial_values
from kvlinker.quality.evaluation.examples import (
    Continuation,
    Example,
    ExampleAnswer,
    Question,
    Result,
    Skipped,
)

EXAMPLES = [
    Question(str(n), "toy", "toy", ("passage",), f"question {n}", ("right",)) for n in range(4)
]


class Scripted:
    """Answers as told: policy -> (how many examples are right, tokens computed again out of
    100)."""

    def __init__(
        self, told: dict[str, tuple[int, int]], skipped: frozenset[str] = frozenset()
    ) -> None:
        self.told = told
        self.skipped = skipped

    def require_supported(self, policies: Sequence[str]) -> None:
        assert set(policies) <= self.told.keys()

    def examine(
        self, example: Example, policies: Sequence[str], _together: Sequence[str] = ()
    ) -> tuple[Result, ...] | Skipped:
        if example.id in self.skipped:
            return Skipped(example.id, "too long")
        return tuple(
            ExampleAnswer(
                example.digest,
                policy,
                text="right" if int(example.id) < self.told[policy][0] else "wrong",
                cached_tokens=100 - self.told[policy][1],
                recomputed_tokens=self.told[policy][1],
                agreement=1.0,
                kl=0.0,
                answer_agreement=1.0,
                answer_kl=0.0,
            )
            for policy in policies
        )


def run(told: dict[str, tuple[int, int]], target: float, **options: Any) -> Any:
    examiner: Any = Scripted(told | {"full": (4, 100)}, **options)
    return calibrate(examiner, EXAMPLES, list(told), target=target)


def test_the_cheapest_setting_that_reaches_the_target_is_chosen() -> None:
    told = {
        "cachecraft-0.1": (1, 5),
        "cachecraft-0.5": (3, 25),
        "cachecraft-1": (4, 50),
        "cachecraft-2": (4, 99),
    }
    assert run(told, 0.75).chosen.policy == "cachecraft-0.5"
    assert run(told, 0.76).chosen.policy == "cachecraft-1"
    assert run(told, 0.1).chosen.policy == "cachecraft-0.1"
    assert run(told, 1.1).chosen is None
    assert [s.of_full for s in run(told, 1).candidates] == [0.25, 0.75, 1, 1]


def test_what_cannot_be_asked_is_left_out_and_told() -> None:
    found = run({"naive": (2, 0)}, 0.5, skipped=frozenset({"0"}))
    assert found.candidates[0].n == 3
    assert [skip.reason for skip in found.skipped] == ["too long"]
    with pytest.raises(InvalidRequestError, match="too long"):
        run({"naive": (2, 0)}, 0.5, skipped=frozenset("0123"))


def test_text_without_answers_chooses_nothing() -> None:
    examiner: Any = Scripted({})
    with pytest.raises(InvalidRequestError, match="give a data set of questions"):
        calibrate(
            examiner,
            [Continuation("0", "toy", "toy", ("passage",), "goes on")],
            ["naive"],
            target=0.9,
        )


def test_candidates_come_from_a_template() -> None:
    assert candidates_of("cachecraft-{}-focus", ["0.5", " 1"]) == (
        "cachecraft-0.5-focus",
        "cachecraft-1-focus",
    )
    with pytest.raises(InvalidRequestError, match="must have one"):
        candidates_of("cachecraft", ["1"])
    with pytest.raises(PolicyError, match="from 0 to 1000"):
        candidates_of("cachecraft-{}", ["5000"])


TRIALS = [
    ("cachecraft-{}", "0.05 0.1 0.2 0.3 0.5 0.75 1 1.5 2"),
    ("cachecraft-{}-focus", "0.05 0.1 0.2 0.3 0.5 0.75 1 1.5 2"),
    ("cachecraft-1-focus-w{}", "1 2 4 8 16 32 64 128 256"),
    ("query-{}", "1 2 5 10 15 20 30 50 75"),
    ("cacheblend-auto-{}-onestep", "1 2 5 10 15 20 30 50 75"),
    ("cacheblend-1-d{}", "1 2 4 8 16 32 64"),
    ("legolink-{}", "1 2 4 8 16 32 64 128 256"),
    ("query-5+attnlink-{}", "2 4 8 16 32 64 128 256 512"),
]


def test_values_to_try_come_from_the_parameter_s_range(subtests: pytest.Subtests) -> None:
    for template, values in TRIALS:
        with subtests.test(template):
            assert " ".join(trial_values(template)) == values
            assert len(candidates_of(template, trial_values(template))) == len(values.split())


def test_values_are_tried_only_where_a_number_goes() -> None:
    for template in ("query", "query-{}-{}"):
        with pytest.raises(InvalidRequestError, match="must have one"):
            trial_values(template)
    for template in ("naive-{}", "legolink-4-{}", "query-{}x"):
        with pytest.raises(
            InvalidRequestError, match=r"where no number goes. This policy is written \w+"
        ):
            trial_values(template)
    with pytest.raises(PolicyError, match="Unknown policy"):
        trial_values("querry-{}")
