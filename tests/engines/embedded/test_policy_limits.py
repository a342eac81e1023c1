"""Policies at the ends of their ranges, next to each other in one batch, and when they fail or are
cancelled."""

import threading

import numpy as np
import pytest

from kvlinker.base.errors import EngineClosedError
from kvlinker.linking import Needs, Policy, parse_policy
from kvlinker.linking.policy import EVERY_LAYER, Union
from tests.engines.embedded.conftest import EVERY_POLICY, linked_prompt, request_for
from tests.engines.embedded.execution.test_oracle import TOLERANCE
from tests.waiting import PATIENCE, wait_until

MODELS = ["llama", "gemma3", "gpt_oss-sinks", "mixtral-moe", "gpt_neox-partial"]
EVERYTHING = [
    "random-100",
    "h2o-100",
    "query-100",
    "query-100-w7",
    "cacheblend-100",
    "cacheblend-100-onestep-k",
    "cachecraft-1000",
    "cachecraft-1000-focus-w1000",
    "legolink-4096",
    "attnlink-4096",
    "prefix",
    "set-prefix",
    "cacheblend-5+random-100",
    "query-3+full",
]
NOTHING = [
    "random-0",
    "h2o-0",
    "query-0",
    "query-0-w7",
    "cacheblend-0",
    "cacheblend-0-onestep",
    "cachecraft-0",
    "cachecraft-0-focus-w1",
    "query-0+cacheblend-0",
]


def agree(made, prompt, policies, same_as):
    """All policies at once answer as ``same_as`` does."""
    expected = made.answer(prompt, same_as)
    for policy, outcome in [(policy, made.submit(prompt, policy)[0]) for policy in policies]:
        outcome.wait()
        assert outcome.failed is None, outcome.failed
        assert outcome.tokens == expected.tokens, policy
        np.testing.assert_allclose(
            outcome.logprobs, expected.logprobs, atol=TOLERANCE, err_msg=policy
        )


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("fresh", [9, 0])
def test_at_one_end_every_policy_is_full(bench, family, fresh):
    made = bench(family)
    prompt = linked_prompt(
        23, 31, 1, 40, middle=2, fresh=fresh
    )  # no header, so that all chunks have chunks before them
    made.cache(prompt)
    agree(made, prompt, EVERYTHING, "full")


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("fresh", [9, 0])
def test_at_the_other_end_every_policy_is_naive(bench, family, fresh):
    made = bench(family)
    prompt = linked_prompt(23, 31, 1, 40, header=3, middle=2, fresh=fresh)
    made.cache(prompt)
    agree(made, prompt, NOTHING, "naive")


@pytest.mark.parametrize(
    "other", ["legolink-3", "h2o-20", "query-10", "cacheblend-20", "cachecraft-1-focus-w1"]
)
def test_a_policy_that_selects_nothing_adds_nothing(bench, other):
    made = bench()
    prompt = linked_prompt(23, 31, 40, header=3, middle=2)
    made.cache(prompt)
    names = [
        f"naive+{other}",
        f"{other}+random-0",
        f"query-0+{other}",
        f"{other}+cacheblend-0",
        f"{other}+cachecraft-0",
    ]
    agree(made, prompt, names, other)


def test_full_with_anything_is_full(bench):
    made = bench()
    prompt = linked_prompt(23, 31, 40, header=3)
    made.cache(prompt)
    agree(
        made,
        prompt,
        [f"{policy}+full" for policy in EVERY_POLICY if policy != "naive-unpositioned"],
        "full",
    )


def answers(made, prompts, max_tokens, policies=EVERY_POLICY):
    """Answers to all prompts, whose chunks are stored, under all policies at once."""
    outcomes = {}
    with made.held() as held:
        for policy in policies:
            for index, prompt in enumerate(prompts):
                outcomes[policy, index] = made.submit(prompt, policy, max_tokens=max_tokens)[0]
        held.wait_until_ready(8)
    return {case: outcome.wait() for case, outcome in outcomes.items()}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "step"),
    [
        ("llama", 512),
        pytest.param("llama", 13, marks=pytest.mark.matrix),
        pytest.param("gemma3", 64, marks=pytest.mark.matrix),
        pytest.param("gpt_oss-sinks", 13, marks=pytest.mark.matrix),
    ],
)
def test_mixed_batches_equal_single_runs(bench, family, step):
    prompts = [
        linked_prompt(23, 31, 18, header=3, middle=2),
        linked_prompt(30, 1, 12, fresh=0, seed=1),
    ]
    together = bench(family, max_step_tokens=step)
    for prompt in prompts:
        together.cache(prompt)
    alone = bench(family, max_running=1)
    for prompt in prompts:
        alone.cache(prompt)
    explanations = [
        together.engine.explain(request_for(prompt, policy))
        for prompt in prompts
        for policy in EVERY_POLICY
    ]
    mixed = answers(together, prompts, 4)
    costs = iter([explanation.result(timeout=60).cost for explanation in explanations])
    for prompt in prompts:
        for policy in EVERY_POLICY:
            assert next(costs) == alone.explain(prompt, policy).cost, policy
    for case, expected in answers(alone, prompts, 4).items():
        assert mixed[case].tokens == expected.tokens, case
        np.testing.assert_allclose(
            mixed[case].logprobs, expected.logprobs, atol=TOLERANCE, err_msg=case
        )
        assert mixed[case].finished.usage == expected.finished.usage, case


@pytest.mark.whole
def test_preempted_requests_answer_as_if_they_had_not_been(bench):
    """Of any policy that looks at evidence, in the first pass, the second or while it decodes."""
    prompts = [linked_prompt(40, 21, 30, fresh=7), linked_prompt(33, 28, fresh=0, header=5, seed=1)]

    def all_answers(slots):
        made = bench(kv_slots=slots, max_step_tokens=24)
        for prompt in prompts:
            made.cache(prompt)
        return answers(made, prompts, 70, EVERY_POLICY[8:]), made.engine.scheduler.preemptions

    roomy, none = all_answers(8192)
    tight, some = all_answers(500)
    assert none == 0 < some
    for case, expected in roomy.items():
        assert tight[case].tokens == expected.tokens, case
        assert tight[case].finished.usage == expected.finished.usage, case


@pytest.mark.parametrize("policy", ["query-20", "query-20+cacheblend-30"])
@pytest.mark.parametrize("step", [1, 3, 7, 8, 9, 11])
def test_a_request_can_be_cancelled_at_any_step(bench, policy, step):
    """28 fresh tokens at 4 a step: the first pass ends with step 7, and the second begins with step
    8."""
    made = bench(max_step_tokens=4)
    prompt = linked_prompt(20, 22, fresh=28)
    made.cache(prompt)
    with made.held() as held:
        outcome, handle = made.submit(prompt, policy, max_tokens=60)
        held.let(step - 1)
        handle.cancel()
    assert outcome.wait().finished.reason == "cancelled"
    made.settle()
    assert made.answer(prompt, policy).finished.reason == "length"


class Failing(Policy):
    """Raises, or returns nonsense, when it is asked to ``when``."""

    family = "failing"

    when: str
    how: str = "raise"
    needs = Needs(question_attention=True, layers=EVERY_LAYER)

    def select(self, prompt, evidence):
        evidence.question_attention()
        return self.fail(len(prompt)) if self.when == "select" else prompt.inexact

    def refine(self, evidence):
        return (
            self.fail(len(evidence.positions)) if self.when == f"refine {evidence.layer}" else None
        )

    def explain(self, prompt, evidence):
        return self.fail(1) if self.when == "explain" else ()

    def fail(self, length):
        if self.how == "raise":
            raise RuntimeError("not today")
        return np.ones(length + 3, dtype=bool)


WAYS = [
    ("select", "raise", "not today"),
    ("select", "shape", "shape"),
    ("refine 0", "raise", "not today"),
    ("refine 2", "raise", "not today"),
    ("refine 1", "shape", "shape"),
]


@pytest.mark.parametrize(("when", "how", "message"), WAYS)
@pytest.mark.parametrize("joined", [False, True])
def test_a_policy_that_fails_fails_its_own_requests_only(bench, when, how, message, joined):
    made = bench(max_step_tokens=16)
    prompt = linked_prompt(30, 25)
    made.cache(prompt)
    neighbours = [
        "legolink-4",
        "query-10",
        "cacheblend-20",
        "query-10+cacheblend-20+cachecraft-1-focus-w1",
    ]
    expected = {name: made.answer(prompt, name).tokens for name in neighbours}
    policy: Policy = Failing(when, how)
    if joined:
        policy = Union((parse_policy("legolink-2"), policy, parse_policy("cacheblend-20")))
    outcomes = [made.submit(prompt, name)[0] for name in neighbours[:2]]
    failing = made.submit(prompt, policy)[0]
    outcomes += [made.submit(prompt, name)[0] for name in neighbours[2:]]
    assert message in failing.wait().failed.error.message
    for name, outcome in zip(neighbours, outcomes, strict=True):
        assert outcome.wait().tokens == expected[name]
    with pytest.raises(Exception, match=message):
        made.explain(prompt, policy)
    made.settle()


def test_a_policy_that_cannot_explain_fails_the_explanation(bench):
    made = bench()
    prompt = linked_prompt(30, 25)
    with pytest.raises(Exception, match="not today"):
        made.explain(prompt, Failing("explain"))
    assert made.answer(prompt, Failing("explain")).failed is None


def test_an_answer_that_cannot_be_explained_fails_alone(bench):
    made = bench()
    prompt = linked_prompt(30, 25)
    expected = made.answer(prompt)
    failing = made.submit(prompt, Failing("explain"), explains=True)[0]
    neighbour = made.submit(prompt)[0]
    assert "not today" in failing.wait(timeout=PATIENCE).failed.error.message
    assert neighbour.wait().tokens == expected.tokens
    assert made.engine.healthy
    made.settle()


def test_closing_ends_an_explanation(bench):
    made = bench()
    with made.held() as held:
        explained = made.engine.explain(request_for(linked_prompt(30, 25), "query-10"))
        held.wait()
        closing = threading.Thread(target=made.engine.close)
        closing.start()
        wait_until(lambda: not made.engine.healthy)
    closing.join()
    with pytest.raises(EngineClosedError):
        explained.result(timeout=60)
