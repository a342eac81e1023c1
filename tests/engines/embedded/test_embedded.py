import gc
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest

from kvlinker.base.errors import (
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    OverloadedError,
)
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.engines.contract.contract import Failed
from kvlinker.engines.embedded.requests.request import ResultKind
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt
from tests.engines.embedded.conftest import Outcome, full_forward, linked_prompt, random_tokens
from tests.waiting import PATIENCE, wait_until

FAMILIES = [
    "llama",
    "gemma3",
    "gpt_oss-sinks",
    "mixtral-moe",
    "mistral-window",
    "gemma4-shared-two-sizes",
    "deepseek_v3-latents-interleaved",
    "longcat-latents-interleaved",
]


def requests():
    """Requests of every kind, of unaligned lengths."""
    return [
        (linked_prompt(33, 47, 21, header=3, seed=1), "legolink-4"),
        (linked_prompt(90, seed=2, fresh=5), "naive"),
        (linked_prompt(seed=3, fresh=70), "full"),
        (linked_prompt(40, 41, 42, seed=4, middle=2), "random-25"),
        (linked_prompt(30, 30, seed=5), "attnlink-6"),
        (linked_prompt(17, 90, seed=6), "prefix"),
        (linked_prompt(seed=7, fresh=1), "legolink-16"),
    ]


def same(outcome, expected):
    assert outcome.failed is None, outcome.failed
    assert outcome.tokens == expected.tokens
    np.testing.assert_allclose(outcome.logprobs, expected.logprobs, atol=3e-5)


ANSWERS: dict[tuple[str, int], list[Outcome]] = {}
"""What each of the requests gets alone, by family and length: the same for all tests."""


def alone(bench, family, max_tokens):
    if (family, max_tokens) not in ANSWERS:
        made = bench(family, max_step_tokens=4096, kv_slots=8192)
        for prompt, _ in requests():
            made.cache(prompt)
        ANSWERS[family, max_tokens] = [
            made.answer(prompt, policy, max_tokens=max_tokens) for prompt, policy in requests()
        ]
    return ANSWERS[family, max_tokens]


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_in_one_batch_equal_requests_alone(bench, family):
    expected = alone(bench, family, 12)
    made = bench(family, max_step_tokens=53, kv_slots=8192)
    outcomes = [made.submit(prompt, policy, max_tokens=12)[0] for prompt, policy in requests()]
    for outcome, single in zip(outcomes, expected, strict=True):
        same(outcome.wait(), single)
    assert made.engine.current_load().slots_used == 0


@pytest.mark.whole
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        pytest.param("deepseek_v3-latents-interleaved", marks=pytest.mark.matrix),
        pytest.param("gemma3", marks=pytest.mark.matrix),
        pytest.param("longcat-latents-interleaved", marks=pytest.mark.matrix),
    ],
)
def test_a_full_pool_preempts_and_resumes(bench, family):
    """Prompts of 610 tokens wait together for 400 slots; as many as fit outgrow them."""
    expected = alone(bench, family, 100)
    made = bench(family, max_step_tokens=64, kv_slots=400)
    for prompt, _ in requests():
        made.cache(prompt)
    with made.held() as held:
        outcomes = [made.submit(prompt, policy, max_tokens=100)[0] for prompt, policy in requests()]
        held.wait_until_ready(len(outcomes))
    for outcome, single in zip(outcomes, expected, strict=True):
        same(outcome.wait(), single)
    assert made.engine.scheduler.preemptions > 0
    assert made.engine.current_load().slots_used == 0


@pytest.mark.parametrize("milliseconds", [1e-3, pytest.param(5, marks=pytest.mark.matrix), 1e4])
def test_answers_are_the_same_whatever_time_a_step_may_take(bench, milliseconds):
    expected = alone(bench, "llama", 12)
    made = bench(max_step_tokens=256, kv_slots=8192, slo_tpot=milliseconds)
    neighbour, handle = made.submit(linked_prompt(60, seed=77), max_tokens=1900)
    neighbour.wait_for_token()
    works = [*requests(), (linked_prompt(50, 60, seed=78), "cacheblend-20")]
    single = made.answer(*works[-1], max_tokens=12)
    outcomes = [made.submit(prompt, policy, max_tokens=12)[0] for prompt, policy in works]
    for outcome, one in zip(outcomes, [*expected, single], strict=True):
        same(outcome.wait(), one)
    handle.cancel()


@pytest.mark.parametrize("prefix_cache", ["on", pytest.param("off", marks=pytest.mark.matrix)])
@pytest.mark.whole
def test_cancelling_and_preempting_change_no_answer_while_steps_are_cut_by_time(
    bench, prefix_cache
):
    expected = alone(bench, "llama", 80)
    made = bench(max_step_tokens=64, kv_slots=260, slo_tpot=1e-3, prefix_cache=prefix_cache)
    prompts = [linked_prompt(50, fresh=40, seed=s) for s in (50, 51, 52, 53)]
    works = [
        (prompt, policy, f"tenant-{number % 3}")
        for number, (prompt, policy) in enumerate(requests())
    ]
    for prompt in prompts:
        made.cache(prompt, "many")
    for prompt, _, tenant in works:
        made.cache(prompt, tenant)
    with made.held() as held:
        neighbours = [made.submit(prompt, tenant="many", max_tokens=150) for prompt in prompts]
        held.let(5)
        outcomes = [
            made.submit(prompt, policy, tenant, max_tokens=80)[0]
            for prompt, policy, tenant in works
        ]
        held.wait_until_ready(len(neighbours) + 3)
        for _, handle in neighbours[1:3]:
            handle.cancel()
    for outcome, single in zip(outcomes, expected, strict=True):
        same(outcome.wait(), single)
    assert [outcome.wait().finished.reason for outcome, _ in neighbours] == [
        "length",
        *2 * ["cancelled"],
        "length",
    ]
    assert made.engine.scheduler.preemptions > 0
    assert made.engine.current_load().slots_used == 0


def test_a_long_queue_is_refused_by_the_time_that_it_would_take(bench):
    made = bench(kv_slots=8192, slo_ttft=1e-4, max_step_tokens=16)
    made.answer(linked_prompt(fresh=400), "full", max_tokens=1)
    long, other = (linked_prompt(fresh=1900, seed=seed) for seed in (1, 2))
    with made.held():
        first, handle = made.submit(long, "full", max_tokens=1)
        with pytest.raises(OverloadedError, match="The first token is expected") as caught:
            made.submit(other, "full", max_tokens=1)
        assert caught.value.retry_after >= 1
        handle.cancel()
    first.wait()


def test_cancelled_neighbours_disturb_nobody_and_free_their_slots(bench):
    expected = alone(bench, "llama", 20)
    made = bench(max_step_tokens=64, kv_slots=8192)
    prompts = [linked_prompt(50, 60, seed=s) for s in (50, 51, 52)]
    for prompt in (*prompts, *(prompt for prompt, _ in requests())):
        made.cache(prompt)
    with made.held() as held:
        neighbours = [made.submit(prompt, max_tokens=500) for prompt in prompts]
        outcomes = [made.submit(prompt, policy, max_tokens=20)[0] for prompt, policy in requests()]
        neighbours[0][1].cancel()
        held.wait_until_ready(8)
        held.let(30)
        for outcome, handle in neighbours[1:]:
            outcome.wait_for_token(timeout=0)
            handle.cancel()
            handle.cancel()
    for outcome, _ in neighbours:
        assert outcome.wait().finished.reason == "cancelled"
    for outcome, single in zip(outcomes, expected, strict=True):
        same(outcome.wait(), single)
    load = made.engine.current_load()
    assert (load.running, load.waiting, load.slots_used) == (0, 0, 0)


def test_decoding_goes_on_while_a_long_prefill_runs(bench):
    made = bench(max_step_tokens=16, kv_slots=8192)
    with made.held() as held:
        decoding, handle = made.submit(linked_prompt(fresh=5), "full", max_tokens=1500)
        held.let(2)
        long, _ = made.submit(linked_prompt(fresh=600, seed=9), "full", max_tokens=1)
        before = decoding.events.qsize()
        held.let(600 // 16)
        seen = decoding.events.qsize() - before
        assert long.events.empty()
        handle.cancel()
    long.wait()
    assert seen >= 600 // 16


def test_the_same_chunk_is_computed_once_for_all_who_ask_at_once(bench):
    made = bench()
    chunk = Chunk(random_tokens(200, 3))
    puts = []
    original = made.store.put

    def noted_put(key, kv):
        puts.append(key)
        return original(key, kv)

    made.store.put = noted_put
    futures = []
    barrier = threading.Barrier(8)

    def ask():
        barrier.wait()
        futures.append(made.engine.cache_chunk(chunk, tenant="default"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sizes = {future.result(timeout=PATIENCE) for future in futures}
    assert sizes == {200 * (made.loaded.kv_bytes_per_token + 12)}  # 12: its scores
    assert len(puts) == 1


def test_tenants_share_no_kv(bench):
    made = bench()
    prompt = linked_prompt(30, 30)
    made.cache(prompt, tenant="a")
    keys = {
        t: chunk_key(prompt.chunks[0], fingerprint=made.engine.fingerprint, tenant=t) for t in "ab"
    }
    assert made.store.tier_of(keys["a"]) == "host"
    assert made.store.tier_of(keys["b"]) is None


def test_lost_kv_is_computed_again(bench):
    made = bench()
    prompt = linked_prompt(30, 44)
    made.cache(prompt)
    before = made.answer(prompt)
    stored = made.store.keys()
    for key in stored:
        made.store.delete(key)
    after = made.answer(prompt)
    same(after, before)
    usages = [outcome.finished.usage for outcome in (before, after, made.answer(prompt))]
    assert usages[1] == replace(
        usages[0], cached_tokens=0, fresh_tokens=usages[0].fresh_tokens + usages[0].cached_tokens
    )
    assert usages[2] == usages[0]
    assert len(made.store.keys()) == 2


def test_a_chunk_may_stand_twice(bench):
    made = bench()
    chunk = CachedSegment(Chunk(random_tokens(25, 1)))
    prompt = Prompt((chunk, FreshSegment((5, 6)), chunk, FreshSegment((7,))))
    made.cache(prompt)
    outcome = made.answer(prompt, "random-100", max_tokens=3)
    tokens, logprobs = full_forward("llama", prompt, 3)
    assert outcome.tokens == tokens
    np.testing.assert_allclose(outcome.logprobs, logprobs, atol=2e-5)


def test_prompts_over_the_limit_are_refused_with_the_figures(bench):
    made = bench(kv_slots=100)
    with pytest.raises(ContextLengthError, match="at most 100 tokens"):
        made.submit(linked_prompt(fresh=100))
    with pytest.raises(ContextLengthError, match="at most 10 tokens"):
        made.submit(linked_prompt(fresh=90), max_tokens=11)
    assert made.answer(linked_prompt(fresh=90), max_tokens=10).finished.reason == "length"
    assert len(made.answer(linked_prompt(fresh=90), max_tokens=None).tokens) == 10


def test_a_long_queue_is_refused_not_hung(bench):
    made = bench(max_waiting=3, max_running=1)
    outcomes = []
    with made.held():
        outcomes.append(made.submit(linked_prompt(seed=0, fresh=50), max_tokens=200))
        wait_until(lambda: made.engine.current_load().running)
        for seed in (1, 2, 3):
            outcomes.append(made.submit(linked_prompt(seed=seed, fresh=50), max_tokens=200))
        with pytest.raises(OverloadedError) as caught:
            made.submit(linked_prompt(seed=4, fresh=50), max_tokens=200)
        assert caught.value.retry_after >= 1
        for _, handle in outcomes:
            handle.cancel()
    for outcome, _ in outcomes:
        outcome.wait()
    assert made.answer(linked_prompt(seed=77)).finished.reason == "length"


def test_closing_fails_what_is_under_way(bench):
    made = bench()
    with made.held() as held:
        outcome, handle = made.submit(linked_prompt(fresh=20), max_tokens=1000)
        held.let(2)
        closing = threading.Thread(target=made.engine.close)
        closing.start()
        wait_until(lambda: not made.engine.healthy)
    outcome.wait()
    closing.join()
    assert isinstance(outcome.failed, Failed)
    assert isinstance(outcome.failed.error, EngineClosedError)
    handle.cancel()
    with pytest.raises(EngineClosedError):
        made.submit(linked_prompt())
    with pytest.raises(EngineClosedError):
        made.engine.cache_chunk(Chunk((1, 2, 3)), tenant="default")


def test_a_sink_that_raises_cancels_its_own_request_only(bench, caplog):
    made = bench()
    good, _ = made.submit(linked_prompt(seed=1), max_tokens=50)

    def broken(choice, event):
        raise RuntimeError("the receiver is gone")

    made.submit(linked_prompt(seed=2), max_tokens=1000, sink=broken)
    assert good.wait().finished.reason == "length"
    assert made.answer(linked_prompt(seed=3)).finished.reason == "length"
    assert "the receiver is gone" in caplog.text


def test_a_failing_step_fails_its_requests_and_the_engine_goes_on(bench, monkeypatch):
    made = bench()
    original = made.engine.runner.step

    def fail_once(*step):
        monkeypatch.setattr(made.engine.runner, "step", original)
        raise MemoryError("no more")

    monkeypatch.setattr(made.engine.runner, "step", fail_once)
    outcome = made.answer(linked_prompt())
    assert "MemoryError" in outcome.failed.error.message
    assert made.answer(linked_prompt()).finished.reason == "length"
    assert made.engine.current_load().slots_used == 0


def test_a_chunk_whose_computation_fails_fails_its_request(bench, monkeypatch):
    made = bench()
    original = made.engine.runner.step

    def fail_once(*step):
        monkeypatch.setattr(made.engine.runner, "step", original)
        raise MemoryError("no more")

    monkeypatch.setattr(made.engine.runner, "step", fail_once)
    outcome = made.answer(linked_prompt(30, 30))
    assert outcome.failed is not None
    assert made.answer(linked_prompt(30, 30)).finished.reason == "length"


@pytest.mark.parametrize("error", [EngineClosedError("closing"), RuntimeError("a bug")])
def test_what_cannot_be_loaded_fails_its_request_only(bench, monkeypatch, caplog, error):
    made = bench()
    prompt = linked_prompt(30, 30)
    made.cache(prompt)
    find = made.store.get_resident

    def fail_once(key):
        monkeypatch.setattr(made.store, "get_resident", find)
        raise error

    monkeypatch.setattr(made.store, "get_resident", fail_once)
    failure = made.answer(prompt).failed.error
    assert (failure is error) == isinstance(error, EngineClosedError)
    assert ("a bug" in caplog.text) == isinstance(error, RuntimeError)
    assert made.answer(prompt).finished.reason == "length"


@pytest.mark.whole
def test_a_chunk_that_gives_its_slots_up_is_scored_as_if_it_had_not(bench):
    """It is computed a second time, and nothing is counted twice."""
    roomy, tight = bench(), bench(kv_slots=263, max_step_tokens=2)
    chunk = Chunk(random_tokens(130, 8))
    roomy.engine.cache_chunk(chunk, tenant="default").result(timeout=PATIENCE)
    with tight.held() as held:
        answer, _ = tight.submit(linked_prompt(fresh=20), "full", max_tokens=200)
        held.let(10)
        computed = tight.engine.cache_chunk(chunk, tenant="default")
    computed.result(timeout=PATIENCE)
    answer.wait()
    assert tight.engine.scheduler.preemptions > 0
    key = chunk_key(chunk, fingerprint=roomy.engine.fingerprint, tenant="default")
    expected, scores = roomy.store.get(key).scores, tight.store.get(key).scores
    np.testing.assert_allclose(scores.received, expected.received, rtol=1e-4)
    np.testing.assert_allclose(scores.sensitivity, expected.sensitivity, rtol=1e-3)
    assert scores.contextualization.intra == pytest.approx(
        expected.contextualization.intra, rel=1e-4
    )


def test_timing_adds_up_to_the_time_to_first_token(bench):
    made = bench()
    timing = made.answer(linked_prompt(30, 30)).finished.timing
    assert min(timing.load, timing.queue, timing.link, timing.decode) >= 0
    assert timing.link > 0
    assert timing.decode > 0
    assert timing.ttft < 60


def test_ids_outside_the_vocabulary_are_refused_before_they_harm_others(bench):
    made = bench()
    good, _ = made.submit(linked_prompt(seed=1), max_tokens=100)
    for token in (-1, 300):
        with pytest.raises(InvalidRequestError, match="0 to 299"):
            made.submit(Prompt((FreshSegment((5, token)),)))
        with pytest.raises(InvalidRequestError, match=str(token)):
            made.engine.cache_chunk(Chunk((token,)), tenant="default")
    assert good.wait().finished.reason == "length"


def submit_noting(made, chunks, prompt, policy="legolink-4"):
    """Submit the prompt; returns its outcome, and how many of the chunks were there at each of its
    events."""
    outcome, done = Outcome(), []

    def note(choice, event):
        done.append(sum(future.done() for future in chunks))
        outcome.put(choice, event)

    made.submit(prompt, policy, sink=note)
    return outcome, done


def test_answers_do_not_wait_for_a_queue_of_chunks(bench):
    made = bench(max_waiting=4, max_running=4)
    with made.held():
        chunks = [
            made.engine.cache_chunk(Chunk(random_tokens(60, [9, i])), tenant="default")
            for i in range(50)
        ]
        outcome, done = submit_noting(made, chunks, linked_prompt(fresh=30), "full")
    assert outcome.wait().finished.reason == "length"
    assert done[-1] < len(chunks)
    scores = 60 * 3 * 4  # three fp32 figures per token
    assert {future.result(timeout=PATIENCE) for future in chunks} == {
        60 * made.loaded.kv_bytes_per_token + scores
    }


def test_a_chunk_that_a_request_waits_for_comes_before_other_chunks(bench):
    made = bench(max_running=4)
    prompt = Prompt((CachedSegment(Chunk(random_tokens(60, [9, 49]))), FreshSegment((5, 6, 7))))
    with made.held() as held:
        chunks = [
            made.engine.cache_chunk(Chunk(random_tokens(60, [9, i])), tenant="default")
            for i in range(50)
        ]
        held.wait()  # else the engine could begin with the chunk that the request needs
        outcome, done = submit_noting(made, chunks, prompt)
        wait_until(
            lambda: any(chunk.urgent for chunk in made.engine.scheduler._waiting[ResultKind.CHUNK])
        )
    assert outcome.wait().finished.reason == "length"
    assert done[-1] < len(chunks)
    for future in chunks:
        future.result(timeout=PATIENCE)


def test_cancelling_while_chunks_are_fetched_answers_at_once(bench):
    made = bench()
    with made.held() as held:
        chunks = [
            made.engine.cache_chunk(Chunk(random_tokens(200, [9, i])), tenant="default")
            for i in range(20)
        ]
        outcome, handle = made.submit(linked_prompt(*[100] * 5, seed=4))
        handle.cancel()
        held.let(1)
        outcome.wait(timeout=0)
        assert not any(future.done() for future in chunks)
    assert outcome.finished.reason == "cancelled"
    assert outcome.finished.usage.prompt_tokens == 0
    for future in chunks:
        future.result(timeout=PATIENCE)


def test_an_engine_that_breaks_answers_everybody_and_says_so(bench, monkeypatch):
    made = bench()

    def broken():
        raise MemoryError("no slots")

    with made.held() as held:
        outcome, _ = made.submit(linked_prompt(fresh=20), max_tokens=1000)
        held.let(2)
        monkeypatch.setattr(made.engine.scheduler, "next_step", broken)
    assert isinstance(outcome.wait().failed.error, EngineClosedError)
    assert not made.engine.healthy
    with pytest.raises(EngineClosedError):
        made.submit(linked_prompt())


def test_an_engine_that_breaks_answers_also_those_whom_it_has_lost(bench, monkeypatch):
    """An exception in the midst of a change may leave requests where their state does not say."""
    made = bench()

    def broken(*_):
        raise KeyError("a request that is not there")

    class Broken(list):
        remove = broken

    with made.held() as held:
        outcomes = [made.submit(linked_prompt(fresh=20), max_tokens=1000)[0] for _ in range(3)]
        held.let(5)
        chunk = made.engine.cache_chunk(Chunk(random_tokens(200, [9, 1])), tenant="default")
        scheduler = made.engine.scheduler
        monkeypatch.setattr(scheduler, "_running", Broken(scheduler._running))
        monkeypatch.setattr(made.engine.scheduler, "next_step", broken)
    for outcome in outcomes:
        assert isinstance(outcome.wait().failed.error, EngineClosedError)
    with pytest.raises(EngineClosedError):
        chunk.result(timeout=PATIENCE)
    assert not made.engine.healthy


def test_a_listener_that_raises_harms_nobody(bench):
    made = bench()

    def broken(event):
        raise RuntimeError("no metrics today")

    made.events.subscribe(broken)
    assert made.answer(linked_prompt(30, 30)).finished.reason == "length"


def test_all_who_wait_for_a_chunk_hear_of_the_closing(bench):
    made = bench()
    futures = [
        made.engine.cache_chunk(Chunk(random_tokens(300, 5)), tenant="default") for _ in range(3)
    ]
    made.engine.close()
    for future in futures:
        try:
            future.result(timeout=PATIENCE)
        except EngineClosedError:
            continue


def test_a_stop_string_completed_at_the_limit_is_a_stop(bench):
    made = bench()
    prompt = linked_prompt(fresh=9)
    text = made.answer(prompt, max_tokens=4).text
    outcome = made.answer(prompt, max_tokens=4, stop=(text[-1],))
    assert outcome.finished.reason == "stop"


def test_an_idle_engine_keeps_no_kv_alive(bench):
    made = bench()
    prompt = linked_prompt(30, 30)
    made.cache(prompt)
    key = chunk_key(prompt.chunks[0], fingerprint=made.engine.fingerprint, tenant="default")
    gone = weakref.ref(made.store.get(key).layers[0].key)
    made.answer(prompt)
    made.settle()
    stored = made.store.keys()
    for other in stored:
        made.store.delete(other)
    wait_until(lambda: gc.collect() >= 0 and gone() is None)
