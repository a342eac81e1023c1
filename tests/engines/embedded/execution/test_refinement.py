"""Policies that drop tokens between layers, in batches where others do not."""

from dataclasses import field

import numpy as np
import pytest

from kvlinker.base.types.chunks import chunk_key
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.engines.contract.contract import GenerationRequest
from kvlinker.linking import Needs, Policy
from kvlinker.linking.policy import EVERY_LAYER
from tests.engines.embedded.conftest import Outcome, full_forward, linked_prompt
from tests.engines.embedded.execution.test_oracle import TOLERANCE, true_chunk_kv, with_garbage

SPOILED = [2, 3, 17, 30]


class Drop(Policy):
    """Computes all tokens in the first layer, and keeps those that deviate at every layer named."""

    family = "drop-for-tests"
    needs = Needs(layers=EVERY_LAYER)

    layers: set
    by: str = "key"
    seen: list = field(default_factory=list)

    def select(self, prompt, evidence):
        return np.ones(len(prompt), dtype=np.bool_)

    def refine(self, evidence):
        if evidence.layer not in self.layers:
            return None
        self.seen.append((evidence.layer, evidence.positions.copy(), evidence.cached.copy()))
        return self.keep(evidence)

    def keep(self, evidence):
        return (evidence.key_deviation() if self.by == "key" else evidence.value_deviation()) > 1e-3


class KeepAll(Drop):
    def keep(self, evidence):
        return np.ones(len(evidence.positions), dtype=np.bool_)


class KeepNone(Drop):
    def keep(self, evidence):
        return np.zeros(len(evidence.positions), dtype=np.bool_)


def submit(made, prompt, policy, **sampling):
    outcome = Outcome()
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
    made.engine.generate(GenerationRequest(prompt, policy, params), outcome.put)
    return outcome


def plant(made, prompt, spoiled):
    for chunk, kv in zip(prompt.chunks, true_chunk_kv(made.loaded, prompt), strict=True):
        key = chunk_key(chunk, fingerprint=made.loaded.fingerprint, tenant="default")
        made.store.put(key, with_garbage(kv, spoiled))


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt_oss-sinks", "mixtral-moe", "gpt_neox-partial"]
)
@pytest.mark.parametrize("by", ["key", "value"])
def test_dropping_exact_tokens_and_keeping_spoiled_ones_changes_nothing(bench, family, by):
    made = bench(family, max_step_tokens=16)
    prompt = linked_prompt(31, 40, header=4)
    tokens, logprobs = full_forward(family, prompt, 4)
    plant(made, prompt, SPOILED)
    policies = [Drop({0}, by), Drop({1}, by), Drop({0, 1, 2}, by), Drop({2}, by)]
    outcomes = [submit(made, prompt, policy) for policy in policies]
    neighbour = made.submit(linked_prompt(20, 20, seed=8), "legolink-2")[0]
    for policy, outcome in zip(policies, outcomes, strict=True):
        outcome.wait()
        assert outcome.tokens == tokens
        np.testing.assert_allclose(outcome.logprobs, logprobs, atol=TOLERANCE)
        assert {layer for layer, _, _ in policy.seen} == policy.layers
    assert (
        neighbour.wait().tokens
        == bench(family).answer(linked_prompt(20, 20, seed=8), "legolink-2").tokens
    )


def test_evidence_tells_positions_and_what_is_cached(bench):
    made = bench()
    prompt = linked_prompt(31, 40, header=4, fresh=5)
    plant(made, prompt, SPOILED)
    policy = Drop({0, 1})
    submit(made, prompt, policy).wait()
    (_, first, first_cached), (_, second, second_cached) = policy.seen
    assert first.tolist() == list(range(len(prompt)))
    assert first_cached.tolist() == [False] * 4 + [True] * 71 + [False] * 5
    spoiled = [4 + p for p in SPOILED] + [35 + p for p in SPOILED]
    assert second[second_cached].tolist() == spoiled
    assert second[~second_cached].tolist() == [0, 1, 2, 3, 75, 76, 77, 78, 79]


class Noting(Drop):
    def keep(self, evidence):
        self.seen[-1] = evidence.cached, evidence.key_deviation(), evidence.value_deviation()
        return evidence.key_deviation() >= 0


def test_fresh_tokens_do_not_deviate(bench):
    """Whatever lay in their slots before."""
    made = bench()
    prompt = linked_prompt(31, 40, header=4, fresh=5)
    plant(made, prompt, SPOILED)
    for tensor in (*made.engine.runner.pool.keys, *made.engine.runner.pool.values):
        tensor.fill_(5.0)
    policy = Noting({0, 1})
    submit(made, prompt, policy).wait()
    for cached, *deviations in policy.seen:
        for deviation in deviations:
            assert not deviation[~cached].any()
            assert (deviation[cached] > 1e-3).sum() == 2 * len(SPOILED)


def test_usage_is_the_average_over_the_layers(bench):
    made = bench()
    prompt = linked_prompt(30, 30, fresh=5)
    plant(made, prompt, [])
    keep_all = submit(made, prompt, KeepAll({1})).wait().finished.usage
    assert (keep_all.cached_tokens, keep_all.recomputed_tokens, keep_all.fresh_tokens) == (0, 60, 5)
    after_one_layer = submit(made, prompt, KeepNone({1})).wait().finished.usage
    assert (after_one_layer.recomputed_tokens, after_one_layer.prompt_tokens) == (20, 65)
    at_once = submit(made, prompt, KeepNone({0})).wait().finished.usage
    assert (at_once.cached_tokens, at_once.recomputed_tokens) == (60, 0)


@pytest.mark.parametrize("layers", [{0}, {1}, {2}, {0, 1, 2}])
def test_the_last_token_is_never_dropped_even_from_a_chunk(bench, layers):
    """Else the request would be answered with a neighbour's logits."""
    made = bench(max_step_tokens=512)
    prompt = linked_prompt(30, 25, fresh=0, header=3)
    tokens, logprobs = full_forward("llama", prompt, 4)
    plant(made, prompt, [])
    neighbours = [
        made.submit(linked_prompt(fresh=20, seed=s), "full", max_tokens=40)[0] for s in (1, 2)
    ]
    for neighbour in neighbours:
        neighbour.wait_for_token()
    outcome = submit(made, prompt, KeepNone(layers)).wait()
    assert outcome.tokens == tokens
    np.testing.assert_allclose(outcome.logprobs, logprobs, atol=TOLERANCE)
    assert outcome.finished.usage.prompt_tokens == len(prompt)


class Raises(Drop):
    def keep(self, evidence):
        raise ValueError("not today")


class WrongShape(Drop):
    def keep(self, evidence):
        return np.ones(3, dtype=np.bool_)


@pytest.mark.parametrize(
    ("policy", "message"), [(Raises({1}), "not today"), (WrongShape({1}), "shape")]
)
def test_a_policy_that_fails_fails_its_own_request_only(bench, policy, message):
    made = bench()
    neighbour = made.submit(linked_prompt(fresh=20, seed=1), "full", max_tokens=60)[
        0
    ].wait_for_token()
    outcome = submit(made, linked_prompt(30, 25), policy).wait()
    assert message in outcome.failed.error.message
    assert neighbour.wait().finished.reason == "length"


class Quantile(Drop):
    """Keeps what deviates most among all active tokens: it depends on everything it is shown."""

    def keep(self, evidence):
        deviation = evidence.key_deviation()
        return deviation >= np.quantile(deviation, 0.8)


@pytest.mark.whole
def test_preemption_does_not_change_what_a_policy_keeps(bench):
    prompts = [linked_prompt(40, 41, 30, seed=s, fresh=7) for s in range(5)]

    def answers(slots):
        made = bench(kv_slots=slots, max_step_tokens=64)
        for prompt in prompts:
            made.cache(prompt)
        params = SamplingParams(temperature=0, max_tokens=150, logprobs=0, ignore_eos=True)
        outcomes = [Outcome() for _ in prompts]
        with made.held() as held:
            for prompt, outcome in zip(prompts, outcomes, strict=True):
                made.engine.generate(GenerationRequest(prompt, Quantile({1}), params), outcome.put)
            held.wait_until_ready(len(prompts))
        return [outcome.wait() for outcome in outcomes], made.engine.scheduler.preemptions

    roomy, none = answers(8192)
    tight, some = answers(500)
    assert none == 0 < some
    for ours, expected in zip(tight, roomy, strict=True):
        assert ours.tokens == expected.tokens
        assert ours.finished.usage == expected.finished.usage


class RaisesBefore(Drop):
    def select(self, prompt, evidence):
        raise ValueError("nor before")


def test_a_policy_that_fails_before_the_first_layer_is_named(bench):
    made = bench()
    outcome = submit(made, linked_prompt(30, 25), RaisesBefore({1})).wait()
    assert "Policy drop-for-tests failed: nor before" in outcome.failed.error.message
    assert made.answer(linked_prompt(30, 25)).finished.reason == "length"


def test_a_policy_may_be_asked_in_one_layer_alone(bench):
    class Once(Drop):
        family = "drop-once-for-tests"
        needs = Needs(layers=2)

    made = bench("llama", max_step_tokens=16)
    prompt = linked_prompt(31, 40, header=4)
    plant(made, prompt, SPOILED)
    policy = Once({0, 1, 2, 3})
    assert submit(made, prompt, policy).wait().tokens == full_forward("llama", prompt, 4)[0]
    assert [layer for layer, _, _ in policy.seen] == [2]
