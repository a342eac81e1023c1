"""The controller on known curves: it keeps the target, settles, and says why it does what it
does."""

import logging
import random
from itertools import pairwise, product

import pytest

from kvlinker.base.errors import InvalidRequestError, PolicyError
from kvlinker.linking import parse_policy
from kvlinker.service.audit.controller import (
    CONFIDENCE,
    EVERYBODY,
    RETRY_ANSWERS,
    Ladder,
    QualityController,
    Reason,
    make_ladder,
)

LADDER = make_ladder(
    parse_policy("query-5"), ["query-1", "query-5", "query-10", "query-20", "full"]
)
FULL = len(LADDER.policies) - 1
TARGET = 0.98


def simulate(curve, answers=4000, *, start=1, seed=0, target=TARGET):
    """Let so many answers agree as the ``curve`` says for each step; return the controller, and the
    steps taken."""
    controller = QualityController(Ladder(LADDER.policies, start), target)
    draw = random.Random(seed)
    names = LADDER.names
    steps = []
    for _ in range(answers):
        steps.append(LADDER.policies.index(controller.policy("t")))
        controller.note("t", names[steps[-1]], draw.random() < curve[steps[-1]], 0.0)
    return controller, steps


def test_it_settles_on_the_cheapest_policy_that_keeps_the_target(subtests):
    curve = [0.6, 0.9, 0.998, 1.0, 1.0]
    for start, seed in product((0, 1, 3, FULL), range(2)):
        with subtests.test(start=start, seed=seed):
            _, steps = simulate(curve, start=start, seed=seed)
            late = steps[2000:]
            assert late.count(2) / len(late) > 0.9
            assert sum(curve[step] for step in late) / len(late) >= TARGET


@pytest.mark.parametrize(
    "curve",
    [
        [0.5, 0.7, 0.9, 0.95, 1.0],
        [0.9, 0.99, 0.999, 1.0, 1.0],
        [0.999, 0.999, 1.0, 1.0, 1.0],
        [0.97, 0.975, 0.99, 0.995, 1.0],
        [0.99, 0.5, 0.99, 0.5, 1.0],
    ],
    ids=["none but full", "the second", "all", "near the target", "not monotonic"],
)
def test_it_keeps_the_target_over_all_answers(curve):
    for seed in range(2):
        controller, steps = simulate(curve, 6000, seed=seed)
        mean = sum(curve[step] for step in steps) / len(steps)
        assert mean >= TARGET - 0.01
        assert len(controller.decisions) <= 24, "every failure doubles the time until the next"


def test_a_policy_that_keeps_the_target_is_rarely_raised():
    """As rarely as the confidence promises."""
    curve = [0.5, TARGET, 1.0, 1.0, 1.0]
    raised = 0
    for seed in range(60):
        controller, _ = simulate(curve, 300, seed=seed)
        raised += any(
            each.reason is Reason.BELOW and each.before == "query-5"
            for each in controller.decisions
        )
    assert raised <= 60 * (1 - CONFIDENCE)


def test_a_bad_policy_is_left_at_once():
    for seed in range(20):
        _, steps = simulate([0.5, 0.5, 1.0, 1.0, 1.0], 60, seed=seed)
        assert steps[-1] == 2
        assert steps.count(1) <= 25


@pytest.mark.parametrize(("rate", "most"), [(0.5, 60), (0.8, 200)])
def test_a_fall_after_a_good_time_is_noticed_soon(rate, most):
    controller = QualityController(Ladder(LADDER.policies, 0), TARGET)
    draw = random.Random(0)
    for _ in range(3000):
        controller.note("t", "query-1", True, 0.0)
    for _ in range(most):
        controller.note("t", "query-1", draw.random() < rate, 0.0)
    (decision,) = controller.decisions
    assert (decision.before, decision.reason) == ("query-1", Reason.BELOW)
    assert decision.samples < 2 * most, "those before the fall are no evidence"


def test_a_policy_that_failed_is_left_alone_and_longer_each_time():
    curve = [0.0, 0.5, 1.0, 1.0, 1.0]
    _, steps = simulate(curve, 8000)
    visits = [
        number
        for number, step in enumerate(steps)
        if step == 1 and (number == 0 or steps[number - 1] != 1)
    ]
    waits = [later - sooner for sooner, later in pairwise(visits)]
    assert waits[0] >= RETRY_ANSWERS
    assert all(later >= 1.9 * sooner for sooner, later in pairwise(waits))


def test_decisions_tell_their_evidence(caplog):
    controller = QualityController(LADDER, TARGET)
    with caplog.at_level(logging.INFO):
        for agrees in (True, False, False, False):
            controller.note("t", "query-5", agrees, 0.0)
    (decision,) = controller.decisions
    assert (decision.tenant, decision.before, decision.after) == (EVERYBODY, "query-5", "query-10")
    assert decision.reason is Reason.BELOW
    assert decision.samples - decision.agreeing >= 2
    assert decision.evidence >= 20
    (record,) = caplog.records
    assert "query-10 instead of query-5" in record.message
    assert f"{decision.agreeing} of {decision.samples} answers agreed" in record.message


def test_full_as_the_last_resort_is_a_warning(caplog):
    controller = QualityController(Ladder(LADDER.policies, FULL - 1), TARGET)
    while controller.policy("t").name != "full":
        controller.note("t", "query-20", False, 0.0)
    assert caplog.records[-1].levelno == logging.WARNING


def test_answers_under_other_policies_are_no_evidence():
    controller = QualityController(LADDER, TARGET)
    for _ in range(50):
        controller.note("t", "naive", False, 0.0)
        controller.note("t", "query-1", False, 0.0)
    assert controller.policy("t").name == "query-5"


@pytest.mark.parametrize("per_tenant", [False, True])
def test_tenants_are_steered_together_or_apart(per_tenant):
    controller = QualityController(LADDER, TARGET, per_tenant=per_tenant)
    for _ in range(5):
        controller.note("one", "query-5", False, 0.0)
    assert controller.policy("one").name == "query-10"
    assert controller.policy("two").name == ("query-5" if per_tenant else "query-10")


LADDERS: list[tuple[str, tuple[str, ...], list[str], int]] = [
    ("query-5", (), ["query-1", "query-2", "query-5", "query-10"], 2),
    ("query-7", (), ["query-1", "query-2", "query-5", "query-7"], 3),
    ("legolink-16", (), ["legolink-1", "legolink-2", "legolink-4", "legolink-8"], 4),
    ("naive", (), ["naive", "query-1-sensitive", "query-2-sensitive", "query-5-sensitive"], 0),
    ("row+query-5", (), [f"row+query-{r}" for r in (1, 2, 5, 10)], 2),
    ("query-5+legolink-4", (), [f"query-{r}+legolink-4" for r in (1, 2, 5, 10)], 2),
    ("row", (), ["row", *(f"query-{r}-sensitive" for r in (1, 2, 5))], 0),
    (
        "query-5",
        ("naive", "query-5", "query-5+legolink-4"),
        ["naive", "query-5", "query-5+legolink-4", "full"],
        1,
    ),
    ("full", ("query-5",), ["query-5", "full"], 1),
]


def test_ladders(subtests):
    for policy, given, names, start in LADDERS:
        with subtests.test(policy, given=given):
            ladder = make_ladder(parse_policy(policy), given)
            assert list(ladder.names[:4]) == names
            assert ladder.start == start
            assert ladder.names[-1] == "full"


def test_ladders_have_what_the_engine_supports():
    def unsupported(policy):
        return "no questions" if policy.family == "query" else None

    assert make_ladder(parse_policy("naive"), unsupported=unsupported).names[:3] == (
        "naive",
        "legolink-1",
        "legolink-2",
    )
    with pytest.raises(PolicyError, match="no questions"):
        make_ladder(parse_policy("naive"), ["naive", "query-5"], unsupported=unsupported)
    with pytest.raises(PolicyError, match="no questions") as refused:
        make_ladder(parse_policy("query-5"), unsupported=unsupported)
    assert refused.value.param == "policy"


def test_the_default_policy_must_be_on_the_ladder():
    with pytest.raises(InvalidRequestError, match="query-5, is none of them"):
        make_ladder(parse_policy("query-5"), ["query-1", "query-10"])
