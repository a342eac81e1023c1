"""A request that ends while its prompt is computed leaves the beginning to those that ask again,
whose answers do not depend on it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvlinker.base.types.chunks import Chunk
from kvlinker.engines.embedded.kv_cache.paths import PathChunk, SequencePath
from kvlinker.engines.embedded.kv_cache.pool import SlotSpan
from kvlinker.engines.embedded.requests import sequence as slots_module
from kvlinker.engines.embedded.requests.sequence import SequenceSlots, TokenSequence
from kvlinker.linking import parse_policy
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt
from kvlinker.store import DiskTier
from kvlinker.store.prefixes import SpilledPrefixes
from tests.engines.embedded.conftest import EVERY_POLICY, random_tokens
from tests.kinds import KINDS

TOLERANCE = 1e-5
STEP = 16
HEADER = random_tokens(37, 1)


def linked(*, seed=0):
    """A prompt of unaligned chunks and texts, and of many steps."""
    segments: list = [FreshSegment(HEADER)]
    for index, length in enumerate((33, 20, 47)):
        segments.append(CachedSegment(Chunk(random_tokens(length, [3, length]))))
        segments.append(FreshSegment(random_tokens(21 + index, [seed, index])))
    return Prompt(tuple(segments))


def fresh(length, seed=0):
    return Prompt((FreshSegment((*HEADER, *random_tokens(length - len(HEADER), [seed, 5]))),))


def leave_after(made, steps, prompt, policy="full", tenant="default"):
    """How a request ended whose caller left after so many steps."""
    made.cache(prompt, tenant)
    with made.held() as held:
        outcome, handle = made.submit(prompt, policy, tenant, max_tokens=16)
        held.let(steps)
        handle.cancel()
    outcome.wait()
    made.settle()
    return outcome


def assert_alike(outcome, cold):
    assert outcome.failed is None, outcome.failed
    assert outcome.tokens == cold.tokens
    np.testing.assert_allclose(outcome.logprobs, cold.logprobs, atol=TOLERANCE)


@pytest.mark.parametrize("family", KINDS)
def test_who_asks_again_goes_on_where_it_was(bench, family):
    """Also after a second time, at lengths that no step ends at."""
    made = bench(family, prefix_cache="on", max_step_tokens=STEP)
    prompt = fresh(131)
    expected = bench(family).answer(prompt, "full")
    left = leave_after(made, 3, prompt)
    assert left.finished.reason == "cancelled"
    assert left.finished.usage.fresh_tokens == left.finished.usage.prompt_tokens == 4 * STEP
    again = leave_after(made, 1, prompt)
    assert again.finished.usage.exact_cached_tokens == 4 * STEP
    assert again.finished.usage.prompt_tokens == 6 * STEP
    outcome = made.answer(prompt, "full")
    assert outcome.finished.usage.exact_cached_tokens == 6 * STEP
    assert outcome.finished.usage.prompt_tokens == len(prompt)
    assert_alike(outcome, expected)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_the_answer_is_that_of_a_computation_in_one_go(bench, policy):
    """Wherever it was left: before, in and behind chunks, in a first pass, and in a second one."""
    prompt = linked()
    made = bench(prefix_cache="on", max_step_tokens=STEP)
    expected = made.answer(prompt, policy, tenant="nobody else")
    reused = set()
    for steps in range(1, 12, 2):
        tenant = f"left after {steps}"
        leave_after(made, steps, prompt, policy, tenant)
        outcome = made.answer(prompt, policy, tenant=tenant)
        assert_alike(outcome, expected)
        assert outcome.finished.usage.prompt_tokens == len(prompt)
        reused.add(outcome.finished.usage.exact_cached_tokens)
    assert max(reused) >= len(HEADER)


def test_what_serves_another_is_what_does_not_depend_on_the_rest(bench):
    """A question that begins alike reuses the common beginning of what was left."""
    made, cold = bench(prefix_cache="on", max_step_tokens=STEP), bench()
    leave_after(made, 9, linked(), "legolink-4")
    other = linked(seed=1)
    outcome = made.answer(other, "legolink-4")
    assert outcome.finished.usage.exact_cached_tokens == len(HEADER) + 33
    assert_alike(outcome, cold.answer(other, "legolink-4"))


@pytest.mark.parametrize("seed", range(3))
def test_many_leave_and_ask_again_at_once(bench, seed):
    draw = random.Random(seed)
    made, cold = bench(prefix_cache="on", max_step_tokens=50, kv_slots=900), bench()
    prompts = [
        (linked(seed=number), draw.choice(["full", "naive", "legolink-4", "query-10"]))
        for number in range(2)
    ] + [(fresh(100 + 31 * number, number), "full") for number in range(3)]
    expected = [cold.answer(prompt, policy) for prompt, policy in prompts]
    for prompt, _ in prompts:
        made.cache(prompt)
    for _ in range(4):
        with made.held() as held:
            asked = [made.submit(prompt, policy) for prompt, policy in prompts]
            held.wait_until_ready(len(asked))
            held.let(draw.randint(1, 5))
            left = draw.sample(range(len(asked)), 3)
            for number in left:
                asked[number][1].cancel()
        for number, (outcome, _) in enumerate(asked):
            outcome.wait()
            if number not in left:
                assert_alike(outcome, expected[number])
    for (prompt, policy), alone in zip(prompts, expected, strict=True):
        assert_alike(made.answer(prompt, policy), alone)


def test_a_beginning_serves_others_while_the_rest_is_computed(bench, monkeypatch):
    """A client that gave up asks again before the engine has heard of it."""
    monkeypatch.setattr(slots_module, "KEPT_TOKENS", 32)
    made = bench(prefix_cache="on", max_step_tokens=STEP)
    prompt = fresh(131)
    expected = bench().answer(prompt, "full")
    with made.held() as held:
        first, _ = made.submit(prompt, "full")
        held.let(4)
        second, _ = made.submit(prompt, "full")
        held.wait_until_ready(2)
    for outcome in (first, second):
        assert_alike(outcome.wait(), expected)
    assert first.finished.usage.exact_cached_tokens == 0
    assert second.finished.usage.exact_cached_tokens == 64


def test_what_was_left_goes_to_disk_and_comes_back(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(SpilledPrefixes, "pays", lambda self, nbytes, seconds: True)
    made = bench(
        slower=lambda events: [DiskTier(tmp_path, 1 << 26, events)],
        prefix_cache="on",
        kv_slots=250,
        max_step_tokens=STEP,
    )
    prompt = fresh(131)
    leave_after(made, 4, prompt)
    made.answer(fresh(240, 9), "full", max_tokens=2)
    made.store._prefixes.flush()
    outcome = made.answer(prompt, "full")
    assert outcome.finished.usage.exact_cached_tokens == 5 * STEP
    assert_alike(outcome, bench().answer(prompt, "full"))


def test_who_gave_its_slots_up_and_left_leaves_its_beginning_too():
    slots = SequenceSlots(200, keeps_prefixes=True)
    path = SequencePath("tenant", np.arange(100))
    sequence = TokenSequence(path.tokens, [(0, 100)], path=lambda: path, most_tokens=110)
    assert slots.admit(sequence)
    sequence.take(41)
    slots.release(sequence)
    sequence.restart()
    prompt = Prompt((FreshSegment(tuple(range(100))),))
    reused = slots.prefixes.find("tenant", prompt, [], parse_policy("full"))
    assert reused is not None
    assert reused.length == 41


def test_numbers_that_are_none_are_left_to_nobody():
    slots = SequenceSlots(200, keeps_prefixes=True, is_finite=lambda spans: False)
    path = SequencePath("tenant", np.arange(100))
    sequence = TokenSequence(path.tokens, [(0, 100)], path=lambda: path, most_tokens=110)
    assert slots.admit(sequence)
    sequence.take(41)
    slots.release(sequence)
    assert len(slots.prefixes) == 0


def test_numbers_in_slots_are_looked_at(bench):
    pool = bench().engine.runner.pool
    spans = [SlotSpan(3, 4), SlotSpan(10, 2)]
    assert pool.is_finite(spans)
    for layers in (pool.keys, pool.values):
        layers[-1][0, 11, 3] = float("nan")
        assert not pool.is_finite(spans)
        assert pool.is_finite([SlotSpan(3, 7)])
        layers[-1][0, 11, 3] = 0


@pytest.mark.parametrize(
    ("end", "together", "tokens", "chunks"),
    [
        (5, None, 5, []),
        (10, None, 10, []),
        (13, None, 10, []),
        (20, None, 20, [10]),
        (35, None, 30, [10]),
        (60, None, 60, [10, 30]),
        (9, (10, 40), 9, []),
        (25, (10, 40), 10, []),
        (39, (10, 40), 10, []),
        (40, (10, 40), 40, [10, 30]),
    ],
)
def test_a_chunk_belongs_to_what_is_computed_whole_or_not_at_all(end, together, tokens, chunks):
    """And with those among whose tokens its own were chosen."""
    named = {start: (PathChunk("chunk", "naive"), 10) for start in (10, 30)}
    path = SequencePath("tenant", np.arange(60), named, together=together).computed_to(end)
    assert len(path.tokens) == tokens
    assert list(path.chunks) == chunks
