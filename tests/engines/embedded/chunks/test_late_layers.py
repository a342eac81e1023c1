"""Chunks whose layers are late or lost hold up nobody but their own requests, and change nobody's
answer."""

import threading

import numpy as np
import pytest

from kvlinker.base.errors import EngineClosedError
from kvlinker.base.types.chunks import chunk_key
from kvlinker.engines.embedded.requests.sequence import TokenSequence
from kvlinker.engines.embedded.scheduling import scheduler
from tests.engines.embedded.chunks.test_layer_loading import (
    POLICIES,
    PROMPT,
    LayerGatedTier,
    behind_a_gate,
    expect_pipelining,
    expected,
    forget_host,
    gated,
    let_time_pass_until,
    reading_only_waits,
    recorded_steps,
)
from tests.engines.embedded.conftest import full_forward, linked_prompt
from tests.engines.embedded.execution.test_oracle import TOLERANCE, true_chunk_kv
from tests.waiting import PATIENCE, wait_until

__all__ = ["expected", "gated", "reading_only_waits"]

NEIGHBOUR = linked_prompt(20, 17, seed=3)


@pytest.fixture
def leaving(monkeypatch):
    """How often each sequence had left a step when it left one."""
    seen = []
    restart_later = scheduler.Scheduler.restart_later

    def noted(self, request, layer):
        sequence = request.sequence
        restart_later(self, request, layer)
        seen.append(sequence.late_count)

    monkeypatch.setattr(scheduler.Scheduler, "restart_later", noted)
    return seen


def decoding_neighbour(made, **options):
    outcome, handle = made.submit(NEIGHBOUR, max_tokens=1900, **options)
    outcome.wait_for_token()
    return outcome, handle


def goes_on(outcome, tokens=20):
    """The neighbour gets so many further tokens."""
    before = outcome.events.qsize()
    wait_until(lambda: outcome.events.qsize() >= before + tokens)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_neighbour_goes_on_while_a_layer_is_late(gated, expected, leaving, policy):
    made, tier = gated
    alone = made.answer(NEIGHBOUR, max_tokens=60)
    neighbour, handle = decoding_neighbour(made)
    tier.let(1)
    late, _ = made.submit(PROMPT, policy)
    wait_until(lambda: leaving)
    goes_on(neighbour)
    assert late.events.empty()
    tier.let(10**6)
    late.wait()
    assert late.tokens == expected[policy][0]
    np.testing.assert_allclose(late.logprobs, expected[policy][1], atol=TOLERANCE)
    handle.cancel()
    neighbour.wait()
    same = min(60, len(neighbour.tokens))
    assert neighbour.tokens[:same] == alone.tokens[:same]
    np.testing.assert_allclose(neighbour.logprobs[:same], alone.logprobs[:same], atol=TOLERANCE)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layer", [1, 2])
def test_a_neighbour_goes_on_when_a_layer_is_lost(gated, expected, leaving, policy, layer):
    made, tier = gated
    neighbour, handle = decoding_neighbour(made)
    tier.unreadable = (layer,)
    tier.let(1)
    lost, _ = made.submit(PROMPT, policy)
    wait_until(lambda: leaving)
    tier.let(10**6)
    lost.wait()
    assert lost.failed is None
    assert lost.tokens == expected[policy][0]
    np.testing.assert_allclose(lost.logprobs, expected[policy][1], atol=1e-3)
    goes_on(neighbour)
    handle.cancel()
    neighbour.wait()


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt_oss-sinks", "mixtral-moe", "gpt_neox-partial"]
)
def test_the_late_and_its_neighbours_answer_as_the_model_does(bench, family, leaving):
    """The true KV is linked, so that nothing less than the model's own answer will do. Neighbours
    decode, or compute their prompts in the step that the late one leaves, some tokens of which a
    policy drops."""
    tiers = []

    def slower(events):
        tiers.append(LayerGatedTier(events))
        return tiers

    made = bench(family, slower=slower, max_step_tokens=512, slo_tpot=1e6)  # all share a step
    tokens, logprobs = full_forward(family, PROMPT, 4)
    for chunk, kv in zip(PROMPT.chunks, true_chunk_kv(made.loaded, PROMPT), strict=True):
        made.store.put(chunk_key(chunk, fingerprint=made.loaded.fingerprint, tenant="default"), kv)
    made.store.flush()
    forget_host(made)
    made.cache(NEIGHBOUR)
    neighbours = {
        policy: made.answer(NEIGHBOUR, policy, max_tokens=4) for policy in ("full", "cacheblend-40")
    }
    expect_pipelining(made)
    decoding, handle = decoding_neighbour(made, policy="full")
    tiers[0].let(1)
    steps = recorded_steps(made)
    with made.held() as held:
        held.wait()
        late, _ = made.submit(PROMPT, "naive", max_tokens=4)
        others = {policy: made.submit(NEIGHBOUR, policy, max_tokens=4)[0] for policy in neighbours}
        held.wait_until_ready(4)
    for policy, outcome in others.items():
        outcome.wait()
        assert outcome.tokens == neighbours[policy].tokens
        np.testing.assert_allclose(outcome.logprobs, neighbours[policy].logprobs, atol=TOLERANCE)
    assert max(len(batch.owners) for batch in steps) == 4
    assert leaving == [1]
    tiers[0].let(10**6)
    assert late.wait().tokens == tokens
    np.testing.assert_allclose(late.logprobs, logprobs, atol=TOLERANCE)
    handle.cancel()
    decoding.wait()


def test_who_waits_alone_leaves_when_another_could_run(gated, expected, leaving):
    made, tier = gated
    tier.let(1)
    late, _ = made.submit(PROMPT)
    wait_until(lambda: made.engine.current_load().running)
    tier.wait_until_reached(1)
    assert not leaving
    assert made.answer(NEIGHBOUR, "full").finished.reason == "length"
    assert leaving == [1]
    tier.let(10**6)
    assert late.wait().tokens == expected["legolink-4"][0]


def test_two_that_are_late_wait_together_until_one_can_go_on(gated, expected, leaving):
    made, tier = gated
    tier.let(0)
    with made.held() as held:
        before, _ = made.submit(linked_prompt(fresh=5), max_tokens=1)
        held.wait()
        both = [made.submit(PROMPT)[0] for _ in range(2)]
        tier.wait_until_reached(0)
        tier.let(1)
        held.wait_until_ready(3)  # so that the step behind this one has both
    before.wait()
    wait_until(lambda: made.engine.current_load().running == 2)
    tier.let(10**6)
    for outcome in both:
        assert outcome.wait().tokens == expected["legolink-4"][0]


def test_who_is_late_again_and_again_is_loaded_whole(gated, expected, leaving, monkeypatch):
    """A layer at a time, each only once the request has begun anew and lacks it."""
    made, tier = gated
    neighbour, handle = decoding_neighbour(made)
    begun, take = [], TokenSequence.take

    def noted(sequence, budget):
        if sequence.arriving:
            begun.append(len(sequence.arriving))
        return take(sequence, budget)

    monkeypatch.setattr(TokenSequence, "take", noted)
    tier.let(1)
    late, _ = made.submit(PROMPT)
    for layers in (2, 3):
        wait_until(lambda: leaving)
        goes_on(neighbour, 5)
        tier.let(layers)
    late.wait()
    assert late.tokens == expected["legolink-4"][0]
    assert leaving in ([1], [1, 2])
    assert len(begun) == len(leaving)
    handle.cancel()
    neighbour.wait()


def test_a_late_request_counts_as_waiting_and_can_be_cancelled(gated, leaving):
    made, tier = gated
    neighbour, handle = decoding_neighbour(made)
    tier.let(1)
    late, cancel = made.submit(PROMPT)
    wait_until(lambda: leaving)
    load = made.engine.current_load()
    assert (load.running, load.waiting) == (1, 1)
    cancel.cancel()
    assert late.wait().finished.reason == "cancelled"
    assert made.engine.current_load().waiting == 0
    tier.let(10**6)
    handle.cancel()
    neighbour.wait()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_cancelled_while_a_layer_was_late_is_reused_by_nobody(bench, expected, policy):
    made, tier = behind_a_gate(bench, prefix_cache="on", max_step_tokens=512)
    tier.let(1)
    late, cancel = made.submit(PROMPT, policy)
    tier.wait_until_reached(1)
    wait_until(lambda: made.engine.current_load().running)
    cancel.cancel()
    assert late.wait().finished.reason == "cancelled"
    assert made.engine.current_load().slots_kept == 0
    tier.let(10**6)
    again = made.answer(PROMPT, policy)
    assert again.tokens == expected[policy][0]
    np.testing.assert_allclose(again.logprobs, expected[policy][1], atol=1e-3)


def test_closing_does_not_wait_for_what_is_late(gated):
    made, tier = gated
    tier.let(1)
    late, _ = made.submit(PROMPT)
    wait_until(lambda: made.engine.current_load().running)
    tier.wait_until_reached(1)
    closing = threading.Thread(target=made.engine.close)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert isinstance(late.wait().failed.error, EngineClosedError)


def test_what_stops_coming_is_computed_while_others_run(gated, expected, leaving):
    made, tier = gated
    neighbour, handle = decoding_neighbour(made)
    tier.let(1)
    stalled, _ = made.submit(PROMPT)
    wait_until(lambda: leaving)
    let_time_pass_until(made, lambda: not stalled.events.empty())
    assert stalled.wait().tokens == expected["legolink-4"][0]
    handle.cancel()
    neighbour.wait()
