"""A preempted request goes on from what is kept of it, and its answer does not depend on it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kvlinker.engines.embedded.requests.sequence import TokenSequence
from kvlinker.linking import parse_policy
from tests.engines.embedded.conftest import EVERY_POLICY
from tests.engines.embedded.kv_cache.test_beginnings import STEP, assert_alike, fresh, linked
from tests.kinds import KINDS


@pytest.fixture
def computed(monkeypatch):
    """By sequence, how often each position was computed."""
    counts: dict[TokenSequence, Counter[int]] = {}
    take = TokenSequence.take

    def noting(sequence, budget):
        runs, visible = take(sequence, budget)
        for run in runs:
            counts.setdefault(sequence, Counter()).update(
                range(run.start, run.start + len(run.tokens))
            )
        return runs, visible

    monkeypatch.setattr(TokenSequence, "take", noting)
    return counts


def again(computed):
    """The positions that were computed more than once, of all sequences."""
    return [
        position for counts in computed.values() for position, count in counts.items() if count > 1
    ]


@pytest.mark.parametrize("family", KINDS)
def test_what_is_kept_of_a_preempted_request_is_not_computed_again(bench, family, computed):
    """Two answers of 100 tokens to prompts of 131, for which the pool has too few slots, though not
    by many: their common header is kept once, so that the first one ends without slots of the
    second one's answer."""
    prompts = [fresh(131, number) for number in range(2)]
    cold = bench(family)
    expected = [cold.answer(prompt, "full", max_tokens=100) for prompt in prompts]
    computed.clear()
    made = bench(family, prefix_cache="on", kv_slots=400, max_step_tokens=64)
    with made.held() as held:
        outcomes = [made.submit(prompt, "full", max_tokens=100)[0] for prompt in prompts]
        held.wait_until_ready(2)
    for outcome, alone in zip(outcomes, expected, strict=True):
        assert_alike(outcome.wait(), alone)
    assert made.engine.scheduler.preemptions > 0
    assert again(computed) == []


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_the_answer_is_that_of_a_computation_in_one_go(bench, policy, computed):
    """Wherever it was preempted for another tenant: before, in and behind chunks, in a first pass,
    and in a second one."""
    prompt, chosen = linked(), parse_policy(policy)
    # else tokens are chosen among those of all chunks, which are kept together or not at all
    is_kept = chosen.exact or chosen.reach is not None
    made = bench(prefix_cache="on", max_step_tokens=2 * STEP, max_running=2)
    expected = made.answer(prompt, policy, tenant="nobody else", max_tokens=8)
    for preempted, steps in enumerate((2, 4, 6), 1):
        tenant = f"preempted after {steps}"
        made.cache(prompt, tenant)
        computed.clear()
        with made.held() as held:
            _, handle = made.submit(fresh(40), "full", tenant, max_tokens=1000)
            held.let(2)
            outcome, _ = made.submit(prompt, policy, tenant, max_tokens=8)
            held.let(steps)
            other, _ = made.submit(fresh(60), "full", "another", max_tokens=2)
            held.wait_until_ready(1)
        assert_alike(outcome.wait(), expected)
        other.wait()
        handle.cancel()
        assert made.engine.scheduler.preemptions == preempted
        assert not is_kept or again(computed) == []


@pytest.mark.parametrize("family", ["llama", "qwen3_5-states"])
def test_choices_go_on_from_what_is_kept_of_each(bench, family, computed):
    """They share their prompt, and have too few slots for all of their answers."""
    prompt, sampled = fresh(100), {"temperature": 1.0, "max_tokens": 80}
    cold = bench(family)
    expected = [cold.answer(prompt, "full", seed=7 + each, **sampled) for each in range(3)]
    computed.clear()
    made = bench(family, prefix_cache="on", kv_slots=300)
    outcomes, _ = made.submit_choices(prompt, 3, "full", seed=7, **sampled)
    for outcome, alone in zip(outcomes, expected, strict=True):
        assert outcome.wait().tokens == alone.tokens
        np.testing.assert_allclose(outcome.logprobs, alone.logprobs, atol=3e-5)
    assert made.engine.scheduler.preemptions > 0
    assert min(again(computed), default=100) >= 100, "the prompt is computed once"
