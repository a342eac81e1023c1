"""Requests that attend to the same chunks in memory: each answers as if it were alone, and what is
in use stays, within budgets, until the last one ends."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

from kvlinker.base.types.chunk_scores import SCORE_BYTES_PER_TOKEN
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.engines.embedded.execution.batch import Batch, OwnTokens, Run, SharedChunk, VisibleKV
from kvlinker.engines.embedded.execution.runner import Runner
from kvlinker.engines.embedded.kv_cache.pool import KVPool, SlotSpan
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt, Segment
from kvlinker.store import HostTier
from kvlinker.store.chunk_kv import changed
from tests.engines.embedded.conftest import full_forward, linked_prompt, random_tokens
from tests.engines.embedded.execution.test_oracle import true_chunk_kv
from tests.toy_models import FAMILIES, loaded_model

TOLERANCE = 2e-5
LIBRARY = [Chunk(random_tokens(length, [7, length])) for length in (23, 31, 40, 17, 57, 29)]
ORDERS = [(0, 1, 2), (2, 0, 1), (1, 2), (0, 2, 1, 0), (2, 2), (1, 0, 2)]
POLICIES = ["naive", "legolink-4", "query-10", "cacheblend-20", "random-30", "full"]


def prompt_of(order, seed, header=0):
    """A prompt of the library's chunks in this order, with a question of its own."""
    segments: list[Segment] = [FreshSegment(random_tokens(header, [seed, 1]))]
    segments += [CachedSegment(LIBRARY[index]) for index in order]
    return Prompt((*segments, FreshSegment(random_tokens(5 + seed % 7, [seed, 2]))))


def bytes_of(made, *chunks):
    """The bytes of chunks in memory, with their scores."""
    return sum(len(chunk) for chunk in chunks) * (
        made.engine.kv_bytes_per_token + SCORE_BYTES_PER_TOKEN
    )


def assert_alike(outcome, alone):
    assert outcome.failed is None, outcome.failed
    assert outcome.tokens == alone.tokens
    np.testing.assert_allclose(outcome.logprobs, alone.logprobs, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_see_a_chunk_each_at_its_own_positions(bench, family):
    """The same chunks in several orders, some of them twice, under policies that compute different
    tokens of them."""
    made = bench(family, max_step_tokens=512)
    prompts = [prompt_of(order, seed, header=3 * seed) for seed, order in enumerate(ORDERS)]
    alone = [
        made.answer(prompt, policy, max_tokens=6)
        for prompt, policy in zip(prompts, POLICIES, strict=True)
    ]
    expected, _ = full_forward(family, prompts[-1], 6)
    assert alone[-1].tokens == expected
    shared: list[int] = []
    views = made.engine.runner.kernel.plan

    def plan(seen, positions):
        owners: dict[int, set[int]] = {}
        for view in seen:
            owners.setdefault(view.segment, set()).add(view.rows.start)
        shared.append(max(map(len, owners.values())))
        return views(seen, positions)

    made.engine.runner.kernel.plan = plan
    together = [
        made.submit(prompt, policy, max_tokens=6)[0]
        for prompt, policy in zip(prompts, POLICIES, strict=True)
    ]
    for outcome, answer in zip(together, alone, strict=True):
        assert_alike(outcome.wait(), answer)
    assert max(shared) >= 4, "they were not computed together"


def test_the_same_batch_gives_the_same_bits():
    loaded = loaded_model("llama")
    prompt = linked_prompt(40, 57, 23)
    kvs = [changed(kv, loaded.resident_form.resident) for kv in true_chunk_kv(loaded, prompt)]
    tokens = np.array(random_tokens(11, 5), dtype=np.int64)

    def logits():
        pool = KVPool(loaded.layers, 64, dtype=loaded.dtype, device=loaded.device)
        runner = Runner(loaded.model, loaded.anatomy, pool)
        runs, visible_kv = [], {}
        for number, order in enumerate([(0, 1, 2), (1, 2), (2, 0), (0,)]):
            start, shared = 0, []
            for index in order:
                shared.append(SharedChunk(kvs[index], start, start, 0, kvs[index].tokens))
                start += kvs[index].tokens
            own = np.arange(start, start + 11)
            owner = object()
            runs.append(Run(16 * number + np.arange(11), start, tokens, True, owner=owner))
            visible_kv[owner] = VisibleKV(
                tuple(shared), (SlotSpan(16 * number, 11),), own, OwnTokens(own, shared)
            )
        return torch.stack(list(runner.step(Batch(tuple(runs), visible_kv)).logits.values()))

    first = logits()
    assert all(torch.equal(logits(), first) for _ in range(3))


def test_a_further_request_takes_slots_for_what_it_computes(bench):
    made = bench()
    prompt = prompt_of((0, 1, 2, 4), 1)
    made.cache(prompt)
    running = [made.submit(prompt, "naive", max_tokens=400) for _ in range(3)]
    for outcome, _ in running:
        outcome.wait_for_token()
    fresh = int((~prompt.cached).sum())
    assert made.engine.current_load().slots_used <= 3 * (fresh + 400 + 1)
    assert made.store.held_bytes == bytes_of(made, *prompt.chunks)
    for _, handle in running:
        handle.cancel()


def test_a_chunk_in_use_is_not_evicted(bench):
    roomy = bench()
    budget = bytes_of(roomy, LIBRARY[0], LIBRARY[1]) + 10_000
    made = bench(memory=budget)
    prompt = prompt_of((0, 1), 3)
    alone = roomy.answer(prompt, "naive", max_tokens=120)
    outcome, _ = made.submit(prompt, "naive", max_tokens=120)
    outcome.wait_for_token()
    for chunk in LIBRARY[2:]:
        made.engine.cache_chunk(chunk, tenant="default").result(timeout=60)
    keys = {
        chunk_key(chunk, fingerprint=made.loaded.fingerprint, tenant="default")
        for chunk in LIBRARY[:2]
    }
    assert keys <= made.store.keys() or outcome.finished is not None
    assert_alike(outcome.wait(), alone)
    made.settle()
    (usage,) = made.store.usage()
    assert usage.used_bytes <= budget
    made.engine.cache_chunk(LIBRARY[4], tenant="default").result(timeout=60)
    assert not keys <= made.store.keys(), "what is not in use is evicted like others"


def test_a_chunk_that_is_deleted_while_in_use_is_used_to_the_end(bench):
    made = bench()
    prompt = prompt_of((0, 1), 3)
    alone = made.answer(prompt, "legolink-4", max_tokens=60)
    outcome, _ = made.submit(prompt, "legolink-4", max_tokens=60)
    outcome.wait_for_token()
    for chunk in prompt.chunks:
        made.store.delete(chunk_key(chunk, fingerprint=made.loaded.fingerprint, tenant="default"))
    assert_alike(outcome.wait(), alone)
    assert not made.store.keys()


@pytest.mark.parametrize("policy", ["naive", "legolink-4", "query-10"])
def test_a_prompt_larger_than_memory_is_answered(bench, policy):
    roomy, tight, none = bench(), bench(memory=20_000), bench(memory=0)
    prompt = prompt_of((0, 1, 2, 3, 4), 2)
    assert bytes_of(tight, *prompt.chunks) > 20_000
    alone = roomy.answer(prompt, policy)
    for made in (tight, none):
        for outcome in [made.submit(prompt, policy)[0] for _ in range(3)]:
            assert_alike(outcome.wait(), alone)
        made.settle()
        assert made.store.held_bytes == 0
        (usage,) = made.store.usage()
        assert usage.used_bytes <= usage.budget_bytes


def test_chunks_that_come_from_a_slower_tier_are_shared_too(bench):
    made = bench(memory=0, slower=lambda events: [HostTier(1 << 28, events, name="slower")])
    prompts = [prompt_of(order, seed) for seed, order in enumerate(ORDERS[:4])]
    alone = [made.answer(prompt, "legolink-4") for prompt in prompts]
    made.store.flush()
    for outcome, answer in zip(
        [made.submit(prompt, "legolink-4")[0] for prompt in prompts], alone, strict=True
    ):
        assert_alike(outcome.wait(), answer)


@pytest.mark.parametrize("seed", range(2))
def test_budgets_hold_whatever_comes_and_goes(bench, seed):
    """Sixty-four requests at once over a library that memory cannot hold, some of them cancelled,
    chunks deleted and made meanwhile."""
    roomy = bench()
    budget = bytes_of(roomy, *LIBRARY[:4])
    made = bench(memory=budget, kv_slots=700, max_running=16)
    draw = random.Random(seed)
    prompts = [
        prompt_of(draw.sample(range(len(LIBRARY)), draw.randint(1, 3)), seed) for seed in range(8)
    ]
    policies = ["naive", "legolink-4", "query-10"]
    alone = {
        (number, policy): roomy.answer(prompt, policy, max_tokens=3)
        for number, prompt in enumerate(prompts)
        for policy in policies
    }
    most, ended = [0], threading.Event()

    def watch():
        while not ended.wait(0.002):
            (usage,) = made.store.usage()
            most.append(max(made.store.held_bytes, usage.used_bytes))

    watching = threading.Thread(target=watch)
    watching.start()
    wanted = [(draw.randrange(len(prompts)), draw.choice(policies)) for _ in range(64)]
    running = [made.submit(prompts[number], policy, max_tokens=3) for number, policy in wanted]
    for _ in range(6):
        draw.choice(running)[1].cancel()
        made.store.delete(draw.choice([*made.store.keys(), "0" * 64]))
        made.engine.cache_chunk(draw.choice(LIBRARY), tenant="default").result(timeout=60)
    for (outcome, _), name in zip(running, wanted, strict=True):
        outcome.wait()
        if outcome.finished is None or outcome.finished.reason != "cancelled":
            assert_alike(outcome, alone[name])
    ended.set()
    watching.join()
    made.settle()
    assert 0 < max(most) <= budget
    assert made.store.held_bytes == 0
