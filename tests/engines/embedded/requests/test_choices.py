"""Several choices for one prompt: linked and computed once, and each as if it had been asked for
alone."""

import numpy as np
import pytest

from kvlinker.base.errors import EngineClosedError, OverloadedError
from kvlinker.base.events import Event, FirstToken, RequestFinished
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.engines.contract.contract import GenerationRequest
from tests.engines.embedded.conftest import EVERY_POLICY, as_policy, full_forward, linked_prompt
from tests.engines.embedded.execution.test_oracle import TOLERANCE
from tests.waiting import wait_until

PROMPT = linked_prompt(30, 41, header=3, middle=2, fresh=12)


def prompt_tokens_computed(made):
    """Notes how many tokens at positions of PROMPT are computed from now on."""
    counted: list[int] = []
    step = made.engine.runner.step

    def counting(batch, *arguments):
        counted.extend(run.end - run.start for run in batch.runs if run.start < len(PROMPT))
        return step(batch, *arguments)

    made.engine.runner.step = counting
    return counted


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt_oss-sinks", "deepseek_v3-latents-interleaved"]
)
def test_greedy_choices_are_what_the_model_says(bench, family):
    made = bench(family, max_step_tokens=17)
    tokens, logprobs = full_forward(family, PROMPT, 4)
    computed = prompt_tokens_computed(made)
    for outcome in made.submit_choices(PROMPT, 3, "full", max_tokens=4)[0]:
        assert outcome.wait().tokens == tokens
        np.testing.assert_allclose(outcome.logprobs, logprobs, atol=TOLERANCE)
    assert sum(computed) == len(PROMPT)


def test_every_choice_has_a_sampler_of_its_own(bench):
    made = bench()
    sampled = {"temperature": 1.0, "max_tokens": 12}
    alone = [made.answer(PROMPT, seed=40 + choice, **sampled) for choice in range(5)]
    computed = prompt_tokens_computed(made)
    together = made.submit_choices(PROMPT, 5, seed=40, **sampled)[0]
    for outcome, expected in zip(together, alone, strict=True):
        assert outcome.wait().tokens == expected.tokens
        np.testing.assert_allclose(outcome.logprobs, expected.logprobs, atol=TOLERANCE)
    assert len({tuple(outcome.tokens) for outcome in together}) > 1
    assert (
        sum(computed)
        == together[0].finished.usage.prompt_tokens - together[0].finished.usage.cached_tokens
    )


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_choices_under_every_policy_are_as_one_alone(bench, policy):
    made = bench()
    made.cache(PROMPT)
    expected = made.answer(PROMPT, policy)
    for outcome in made.submit_choices(PROMPT, 3, policy)[0]:
        outcome.wait()
        assert outcome.tokens == expected.tokens
        np.testing.assert_allclose(outcome.logprobs, expected.logprobs, atol=TOLERANCE)
        assert outcome.finished.usage == expected.finished.usage


def test_choices_of_different_lengths_end_each_for_itself(bench):
    made = bench()
    text = made.answer(PROMPT, temperature=1.0, seed=2, max_tokens=20).text
    outcomes = made.submit_choices(
        PROMPT, 4, temperature=1.0, seed=1, max_tokens=20, stop=(text[5],)
    )[0]
    reasons = {outcome.wait().finished.reason for outcome in outcomes}
    assert "stop" in reasons
    assert made.engine.current_load().slots_used == 0


def test_one_token_each_needs_no_slots_for_the_others(bench):
    made = bench(kv_slots=128)
    outcomes = made.submit_choices(PROMPT, 20, "full", temperature=1.0, max_tokens=1)[0]
    assert all(len(outcome.wait().tokens) == 1 for outcome in outcomes)


def test_choices_that_do_not_fit_take_over_slots(bench):
    made = bench(kv_slots=256)
    made.cache(PROMPT)
    expected = made.answer(PROMPT, max_tokens=30)
    computed = prompt_tokens_computed(made)
    outcomes = made.submit_choices(PROMPT, 9, max_tokens=30)[0]
    for outcome in outcomes:
        assert outcome.wait().tokens == expected.tokens
        np.testing.assert_allclose(outcome.logprobs, expected.logprobs, atol=TOLERANCE)
    usage = expected.finished.usage
    assert sum(computed) == usage.recomputed_tokens + usage.fresh_tokens


@pytest.mark.whole
@pytest.mark.parametrize("policy", ["legolink-4", "cacheblend-30", "query-20"])
def test_preempted_choices_answer_as_if_they_had_not_been(bench, policy):
    roomy, tight = bench(), bench(kv_slots=400, max_step_tokens=40)
    sampled = {"temperature": 1.0, "seed": 3, "max_tokens": 150}
    expected = [
        outcome.wait().tokens for outcome in roomy.submit_choices(PROMPT, 4, policy, **sampled)[0]
    ]
    outcomes = tight.submit_choices(PROMPT, 4, policy, **sampled)[0]
    assert [outcome.wait().tokens for outcome in outcomes] == expected
    assert tight.engine.scheduler.preemptions > 0


@pytest.mark.whole
def test_many_requests_with_many_choices_all_succeed(bench):
    made = bench(kv_slots=1024, max_running=16, max_waiting=8)
    groups = [
        made.submit_choices(
            linked_prompt(20, seed=seed, fresh=5), 128, temperature=1.0, max_tokens=2
        )[0]
        for seed in range(8)
    ]
    for group in groups:
        for outcome in group:
            assert outcome.wait().finished.reason == "length"


def test_a_request_that_is_refused_holds_no_place(bench):
    made = bench(max_waiting=2, max_running=1)
    running = made.submit_choices(PROMPT, 3, max_tokens=1000)
    running[0][0].wait_for_token()
    waiting = [made.submit_choices(PROMPT, 50, max_tokens=1) for _ in range(2)]
    for _ in range(3):
        with pytest.raises(OverloadedError, match="2 requests"):
            made.submit_choices(PROMPT, 2)
    assert made.engine.current_load().waiting == 2
    for outcomes, handle in [*waiting, running]:
        handle.cancel()
        for outcome in outcomes:
            assert outcome.wait().finished.reason == "cancelled"
    assert made.answer(PROMPT).finished.reason == "length"


def test_cancelling_ends_all_choices(bench):
    made = bench(max_step_tokens=8, kv_slots=300)
    outcomes, handle = made.submit_choices(PROMPT, 5, max_tokens=100)
    outcomes[0].wait_for_token()
    handle.cancel()
    assert {outcome.wait().finished.reason for outcome in outcomes} == {"cancelled"}
    early, handle = made.submit_choices(linked_prompt(*[60] * 3, seed=7), 5, max_tokens=100)
    handle.cancel()
    handle.cancel()
    assert {outcome.wait().finished.reason for outcome in early} == {"cancelled"}
    assert all(outcome.events.empty() for outcome in (*outcomes, *early))


def test_a_sink_that_fails_for_one_choice_ends_all(bench, caplog):
    made = bench(kv_slots=300)
    seen = []

    def sink(choice, event):
        seen.append(choice)
        if choice == 1:
            raise RuntimeError("the receiver is gone")

    request = GenerationRequest(
        PROMPT, as_policy("naive"), SamplingParams(max_tokens=200, ignore_eos=True), n=4
    )
    made.engine.generate(request, sink)
    made.settle()
    wait_until(lambda: seen.count(1) == 2)  # its first token, and its end
    assert seen.count(3) <= 4


def test_closing_fails_all_choices(bench):
    made = bench()
    outcomes, _ = made.submit_choices(PROMPT, 3, max_tokens=1000)
    outcomes[2].wait_for_token()
    made.engine.close()
    for outcome in outcomes:
        assert isinstance(outcome.wait().failed.error, EngineClosedError)


def test_the_prompt_counts_once_among_events_and_is_told_with_every_choice(bench):
    made = bench()
    made.cache(PROMPT)
    events: list[Event] = []
    made.events.subscribe(events.append)
    outcomes = [outcome.wait() for outcome in made.submit_choices(PROMPT, 3, max_tokens=4)[0]]
    assert len({outcome.finished.usage for outcome in outcomes}) == 1
    finished = [event for event in events if isinstance(event, RequestFinished)]
    assert sorted(
        event.cached_tokens + event.recomputed_tokens + event.fresh_tokens for event in finished
    ) == [
        0,
        0,
        len(PROMPT),
    ]
    assert [event.output_tokens for event in finished] == [4, 4, 4]
    assert len([event for event in events if isinstance(event, FirstToken)]) == 3


def test_a_prompt_that_fails_fails_all_choices(bench, monkeypatch):
    made = bench()
    step = made.engine.runner.step

    def fail_once(*arguments):
        monkeypatch.setattr(made.engine.runner, "step", step)
        raise MemoryError("no more")

    monkeypatch.setattr(made.engine.runner, "step", fail_once)
    outcomes, _ = made.submit_choices(linked_prompt(fresh=30), 3, "full")
    assert all("MemoryError" in outcome.wait().failed.error.message for outcome in outcomes)
