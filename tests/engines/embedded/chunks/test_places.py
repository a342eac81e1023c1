"""Chunks' KV at later places in a row: exact, computed while the engine is idle, and a tenant's
own."""

import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import reduce
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvlinker.base.errors import EngineClosedError, StoreError
from kvlinker.base.types.chunks import Chunk, Origin, chunk_key, place_keys, with_places
from kvlinker.engines.contract.places import ROW, ROW_ROOM, circles, orders
from kvlinker.linking import parse_policy
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt
from kvlinker.store import ChunkKV
from kvlinker.store.chunk_kv import LayerKV, mean_with
from tests.engines.embedded.conftest import full_forward, random_tokens
from tests.engines.embedded.execution.test_oracle import TOLERANCE, true_chunk_kv
from tests.waiting import PATIENCE

KINDS = ["llama", "gemma3", "gpt_oss-sinks", "deepseek_v3-latents-interleaved"]
"""Full attention, windows, sinks, latents."""

STEPS = 4


@pytest.fixture(autouse=True)
def _one_context(monkeypatch):
    """Tests of means ask for more."""
    compute_in(monkeypatch, 1)


def compute_in(monkeypatch, contexts):
    """Has chunks computed in so many contexts at most."""
    monkeypatch.setattr("kvlinker.engines.contract.places.CONTEXTS", contexts)


def passes_of(made, monkeypatch, failing=()):
    """The texts that are computed from now on; the passes of these numbers fail, once."""
    texts: list[tuple[int, ...]] = []
    failing = list(failing)
    enter = made.engine.scheduler.enter

    def entered(request):
        texts.append(tuple(request.sequence.tokens.tolist()))
        if failing and len(texts) > failing[0]:
            failing.pop(0)
            raise RuntimeError("no more")
        return enter(request)

    monkeypatch.setattr(made.engine.scheduler, "enter", entered)
    return texts


def behind_header(*lengths, seed=0, shared=False):
    """A prompt of chunks that were computed behind its first tokens."""
    header = random_tokens(5, seed)
    chunks = [
        Chunk(random_tokens(length, [seed, index]), header, shared=shared)
        for index, length in enumerate(lengths)
    ]
    fresh = FreshSegment(random_tokens(9, [seed, 99]))
    return Prompt((FreshSegment(header), *map(CachedSegment, chunks), fresh))


def key(made, chunk, tenant="default"):
    return chunk_key(chunk, fingerprint=made.loaded.fingerprint, tenant=tenant)


def places_of(made, prompt, tenant="default"):
    """The places at which the store has KV of each chunk."""
    return [
        [at for at in range(ROW) if made.store.tier_of(key(made, replace(chunk, place=at), tenant))]
        for chunk in prompt.chunks
    ]


def answer(made, prompt, policy="row", **options):
    return made.answer(prompt, policy, max_tokens=STEPS, **options)


def computed_rows(made, prompt, tenant="default"):
    """Has the rows of a prompt computed."""
    made.submit(prompt, "row", tenant, max_tokens=1)[0].wait()
    rest(made)


def offered(made, chunks):
    """Has the rows of chunks computed without a prompt."""
    made.engine._places.offer(chunks, "default")
    rest(made)


def rest(made):
    """Waits until all rows that were offered before are computed."""
    made.engine.settle().result(PATIENCE)
    made.settle()


@pytest.mark.parametrize("count", range(2, ROW + 1))
def test_each_chunk_stands_at_each_place_once_in_a_circle(count):
    for circle in range(count - 1):
        found = np.array(orders(count, circle))
        assert found.shape == (count, count)
        for place in found.T:
            assert set(place) == set(range(count))


@pytest.mark.parametrize("count", range(3, ROW + 1))
def test_chunks_have_other_neighbours_in_other_circles(count):
    pairs = [(order[0], order[1]) for at in range(count - 1) for order in orders(count, at)]
    assert len(set(pairs)) >= 0.8 * len(pairs)
    assert len({order for at in range(count - 1) for order in orders(count, at)}) == len(pairs)


@pytest.mark.parametrize("family", KINDS)
def test_kv_at_a_place_is_that_of_the_models_own_pass_over_the_row(bench, family):
    made = bench(family, max_step_tokens=29)
    prompt = behind_header(23, 31, 17)
    computed_rows(made, prompt)
    assert places_of(made, prompt) == [[0, 1, 2], [1, 2], [1, 2]]
    for order in orders(3):
        row = [prompt.chunks[index] for index in order]
        own = true_chunk_kv(made.loaded, prompt.with_chunks(row))
        for place in (1, 2):
            stored = made.store.get_computed(key(made, replace(row[place], place=place)))
            for layer, expected in zip(stored.layers, own[place].layers, strict=True):
                for part, other in zip(layer.parts, expected.parts, strict=True):
                    torch.testing.assert_close(part, other, atol=TOLERANCE, rtol=TOLERANCE)


def true_means(made, prompt):
    """The mean of the model's own KV of each chunk at each place, over all circles, by its key."""
    own: dict[str, ChunkKV] = {}
    count = len(prompt.chunks)
    for circle in range(circles(count)):
        for order in orders(count, circle):
            row = [prompt.chunks[index] for index in order]
            computed = true_chunk_kv(made.loaded, prompt.with_chunks(row))
            for place, (chunk, kv) in enumerate(zip(row, computed, strict=True)):
                if place:
                    at = key(made, replace(chunk, place=place))
                    kv = ChunkKV(kv.layers)
                    own[at] = mean_with(kv, own[at]) if at in own else kv
    return own


def assert_is_mean(made, prompt):
    """The store has the mean over all contexts of each chunk at each place."""
    for at, expected in true_means(made, prompt).items():
        stored = made.store.get_computed(at)
        assert stored.contexts == expected.contexts == circles(len(prompt.chunks))
        for layer, its in zip(stored.layers, expected.layers, strict=True):
            for part, other in zip(layer.parts, its.parts, strict=True):
                torch.testing.assert_close(part, other, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_mean_counts_each_context_alike():
    """As mean_with is also the oracle of the tests that follow."""
    kvs = [
        ChunkKV((LayerKV(torch.full((1, 2, 4), number), torch.full((1, 2, 4), -number)),))
        for number in (1.0, 5.0, 9.0)
    ]
    mean = reduce(mean_with, kvs)
    assert mean.contexts == 3
    torch.testing.assert_close(mean.layers[0].key, torch.full((1, 2, 4), 5.0))
    torch.testing.assert_close(mean.layers[0].value, torch.full((1, 2, 4), -5.0))


@pytest.mark.parametrize("family", KINDS)
def test_kv_at_a_place_becomes_the_mean_over_other_orders(bench, monkeypatch, family):
    compute_in(monkeypatch, 4)
    made = bench(family, max_step_tokens=29)
    prompt = behind_header(23, 31, 17)
    computed_rows(made, prompt)
    assert_is_mean(made, prompt)


def test_means_go_on_where_they_were_cut_short(bench, monkeypatch):
    """Also in another process, which sees from the KV how many contexts it has."""
    compute_in(monkeypatch, 4)
    made = bench()
    prompt = behind_header(23, 31, 17, 11)
    made.cache(prompt)
    texts = passes_of(made, monkeypatch, failing=[2, 9])
    for _ in range(3):
        offered(made, prompt.chunks)
    assert_is_mean(made, prompt)
    count = len(texts)
    made.engine._places._contexts.clear()
    offered(made, prompt.chunks)
    offered(made, prompt.chunks)
    assert len(texts) == count


def test_rows_whose_kv_gets_no_more_contexts_are_given_up(bench, monkeypatch):
    """As under a store that evicts it again and again: they would be computed for ever."""
    compute_in(monkeypatch, 4)
    monkeypatch.setattr("kvlinker.engines.contract.places.mean_with", lambda kv, _stored: kv)
    made = bench()
    prompt = behind_header(23, 31, 17, 11)
    made.cache(prompt)
    texts = passes_of(made, monkeypatch)
    offered(made, prompt.chunks)
    assert len(texts) == 2 * 4


def test_rows_without_kv_come_before_means(bench, monkeypatch):
    compute_in(monkeypatch, 4)
    made = bench()
    first, second = behind_header(23, 31, 17), behind_header(19, 29, 13, seed=1)
    made.cache(first)
    made.cache(second)
    texts = passes_of(made, monkeypatch)
    with made.held():
        made.engine._places.offer(first.chunks, "default")
        made.engine._places.offer(second.chunks, "default")
    rest(made)
    of_first = [text[: len(first.chunks[0].prefix)] == first.chunks[0].prefix for text in texts]
    assert len(texts) == 2 * 2 * 3
    assert sum(of_first[:6]) == 3
    assert_is_mean(made, first)
    assert_is_mean(made, second)


@pytest.mark.parametrize("family", KINDS)
def test_a_prompt_is_computed_in_full_first_and_then_linked(bench, family):
    """With what the model itself makes of the prompt under the keys of its chunks' places, the
    answer is the model's own, and nothing is computed again."""
    made = bench(family, max_step_tokens=29)
    prompt = behind_header(23, 31, 17)
    made.cache(prompt)
    tokens, logprobs = full_forward(family, prompt, STEPS)
    with made.held():  # the rows wait
        first, _ = made.submit(prompt, "row", max_tokens=STEPS)
    assert first.wait().tokens == tokens
    assert first.logprobs == pytest.approx(logprobs, abs=TOLERANCE)
    assert first.finished.usage.recomputed_tokens == 31 + 17
    rest(made)
    own = true_chunk_kv(made.loaded, prompt)
    for place, (chunk, kv) in enumerate(zip(prompt.chunks, own, strict=True)):
        if place:
            at = key(made, replace(chunk, place=place))
            assert made.store.delete(at)
            made.store.put(at, ChunkKV(kv.layers))
    again = answer(made, prompt)
    assert again.tokens == tokens
    assert again.logprobs == pytest.approx(logprobs, abs=TOLERANCE)
    usage = again.finished.usage
    assert (usage.cached_tokens, usage.recomputed_tokens) == (23 + 31 + 17, 0)


def test_answers_behind_rows_are_the_same_whatever_comes_between(bench):
    """Several prompts at once, in few slots, for which some wait."""
    roomy, tight = bench(), bench(kv_slots=220, max_step_tokens=16)
    prompts = [behind_header(23, 31, 17, seed=seed) for seed in range(4)]
    expected = []
    for prompt in prompts:
        computed_rows(roomy, prompt)
        computed_rows(tight, prompt)
        expected.append(answer(roomy, prompt, "row+legolink-2"))
    outcomes = [tight.submit(p, "row+legolink-2", max_tokens=STEPS)[0] for p in prompts]
    for outcome, alone in zip(outcomes, expected, strict=True):
        assert outcome.wait().tokens == alone.tokens
        assert outcome.logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE)


def test_an_answer_is_right_where_the_kv_that_it_chose_is_gone(bench, monkeypatch):
    made = bench()
    prompt = behind_header(23, 31)
    computed_rows(made, prompt)
    naive = answer(made, prompt, "naive")
    monkeypatch.setattr(type(made.store), "tier_of", lambda store, key: "memory")
    for chunk in prompt.chunks:
        for each in place_keys(key(made, chunk)):
            made.store.delete(each)
    assert answer(made, prompt).logprobs == pytest.approx(naive.logprobs, abs=TOLERANCE)


def test_late_rows_are_not_computed_for_what_nobody_has_any_more(bench, monkeypatch):
    monkeypatch.setattr("kvlinker.engines.contract.places.WANTED_SECONDS", 0.0)
    made = bench()
    kept, gone = behind_header(23, 31), behind_header(23, 31, seed=1)
    made.cache(kept)
    made.cache(gone)
    made.store.delete(key(made, gone.chunks[1]))
    for prompt in (kept, gone):
        offered(made, prompt.chunks)
    assert places_of(made, kept) == [[0, 1], [0, 1]]
    assert places_of(made, gone) == [[0], []]


def test_a_row_that_waited_until_its_chunks_were_deleted_is_not_kept(bench, monkeypatch):
    monkeypatch.setattr("kvlinker.engines.contract.places.WANTED_SECONDS", 0.0)
    made = bench()
    prompt = behind_header(23, 31)
    made.cache(prompt)
    with made.held() as held:
        made.engine._places.offer(prompt.chunks, "default")
        held.wait()
        for chunk in prompt.chunks:
            made.store.delete(key(made, chunk))
    rest(made)
    assert places_of(made, prompt) == [[], []]


def test_tenants_have_rows_of_their_own(bench):
    made = bench()
    prompt = behind_header(23, 31)
    computed_rows(made, prompt, "a")
    made.cache(prompt, "b")
    assert places_of(made, prompt, "a") == [[0, 1], [1]]
    assert places_of(made, prompt, "b") == [[0], [0]]


def test_shared_chunks_stand_behind_shared_ones_alone(bench):
    """Their KV is everybody's: it must not say what a tenant's own text says."""
    made = bench()
    own, shared = behind_header(23, 31), behind_header(19, 17, seed=1, shared=True)
    mixed = own.with_chunks([shared.chunks[0], own.chunks[1]])
    mixed = mixed.with_chunks(replace(c, prefix=own.chunks[0].prefix) for c in mixed.chunks)
    computed_rows(made, mixed)
    assert places_of(made, mixed) == [[0], [1]]
    first, second = mixed.chunks
    behind = Prompt((FreshSegment(first.prefix), CachedSegment(first), CachedSegment(second)))
    _, expected = true_chunk_kv(made.loaded, behind)
    stored = made.store.get_computed(key(made, replace(second, place=1)))
    for layer, own_layer in zip(stored.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer.value, own_layer.value, atol=TOLERANCE, rtol=TOLERANCE)


def test_kept_answers_stand_in_no_row(bench):
    made = bench()
    prompt = behind_header(23, 31)
    kept = replace(prompt.chunks[1], origin=Origin.ANSWER)
    made.cache(prompt)
    offered(made, [prompt.chunks[0], kept])
    assert places_of(made, prompt) == [[0], [0]]


def test_rows_that_the_model_does_not_take_are_shorter(bench):
    made = bench(kv_slots=100)
    prompt = behind_header(40, 40, 40)
    made.cache(prompt)
    offered(made, prompt.chunks)
    assert places_of(made, prompt) == [[0, 1], [0, 1], [0, 1]]


def test_rows_leave_room_for_what_chunks_have_at_their_first_place(bench, monkeypatch, caplog):
    made = bench()
    prompt = behind_header(10, 10, 10, 10)
    made.cache(prompt)
    room = made.loaded.kv_bytes(20) / ROW_ROOM
    monkeypatch.setattr(type(made.store), "largest_budget_bytes", room)
    offered(made, prompt.chunks)
    assert places_of(made, prompt) == [[0, 1]] * 4
    monkeypatch.setattr(type(made.store), "largest_budget_bytes", room - 1)
    others = behind_header(10, 10, 10, 10, seed=1)
    made.cache(others)
    offered(made, others.chunks)
    assert places_of(made, others) == [[0]] * 4
    assert "row computes it in full" in caplog.text


def test_a_row_that_was_cut_short_is_gone_on_with(bench, monkeypatch):
    """What was computed is not computed again; until all is there, no other place stands in."""
    made = bench()
    prompt = behind_header(23, 31, 17, 11)
    made.cache(prompt)
    enter = made.engine.scheduler.enter
    failing: list[Exception | None] = []
    entered = []

    def counted(request):
        entered.append(request)
        raised(failing[len(entered) - 1 :])
        return enter(request)

    monkeypatch.setattr(made.engine.scheduler, "enter", counted)
    failing[:] = [None, None, RuntimeError("no more")]
    offered(made, prompt.chunks)
    assert places_of(made, prompt) == [[0, 3], [0], [0, 2], [0, 2, 3]]
    failing.clear()
    offered(made, prompt.chunks)
    assert len(entered) == 3 + 4
    assert places_of(made, prompt) == [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize("failure", [RuntimeError, StoreError])
def test_a_row_that_fails_keeps_no_other_from_being_computed(bench, monkeypatch, caplog, failure):
    """The error of a store, such as a full disk, is told in one line."""
    made = bench()
    good, bad = behind_header(23, 31), behind_header(29, 37, seed=1)
    made.cache(good)
    made.cache(bad)
    enter = made.engine.scheduler.enter
    failing = [failure("no more")]
    monkeypatch.setattr(
        made.engine.scheduler, "enter", lambda request: raised(failing) or enter(request)
    )
    offered(made, bad.chunks)
    assert "no more" in caplog.text
    assert ("Traceback" in caplog.text) == (failure is RuntimeError)
    offered(made, good.chunks)
    assert places_of(made, good) == [[0, 1], [0, 1]]
    assert places_of(made, bad) == [[0], [0]]


def raised(errors):
    """Raises the first of the errors, unless it is None."""
    if errors and errors[0]:
        raise errors.pop(0)


def test_many_rows_that_nobody_needs_any_more_are_dropped(bench, monkeypatch):
    monkeypatch.setattr("kvlinker.engines.contract.places.WANTED_SECONDS", 0.0)
    made = bench()
    chunks = behind_header(*[5] * 2 * sys.getrecursionlimit()).chunks
    wanted = behind_header(23, 31, seed=1)
    made.cache(wanted)
    offered(made, chunks)
    offered(made, wanted.chunks)
    assert places_of(made, wanted) == [[0, 1], [0, 1]]


def test_rows_are_computed_once(bench, monkeypatch):
    made = bench()
    prompt = behind_header(23, 31, 17)
    made.cache(prompt)
    entered = []
    enter = made.engine.scheduler.enter

    def counted(request):
        entered.append(request)
        return enter(request)

    monkeypatch.setattr(made.engine.scheduler, "enter", counted)
    with made.held():
        for _ in range(3):
            made.engine._places.offer(prompt.chunks, "default")
    rest(made)
    offered(made, prompt.chunks)
    assert len(entered) == len(orders(3))


def test_chunks_may_be_expected_of_a_closed_engine(bench):
    """A creation that ends while the server stops has its chunks all the same."""
    made = bench(policy="row")
    made.engine.close()
    made.engine.expect_together(behind_header(23, 31).chunks, tenant="default")


def test_a_row_may_end_after_the_engine_was_closed(bench, monkeypatch, caplog):
    made = bench(policy="row")
    begun = threading.Event()
    computed: Future[None] = Future()

    def enter(request):
        begun.set()
        return SimpleNamespace(future=computed)

    monkeypatch.setattr(made.engine.scheduler, "enter", enter)
    made.engine.expect_together(behind_header(23, 31).chunks, tenant="default")
    assert begun.wait(PATIENCE)
    made.engine.close()
    computed.set_exception(EngineClosedError("closed"))
    assert "exception calling callback" not in caplog.text


def test_models_with_states_refuse_rows(bench):
    made = bench("qwen3_5-states", policy="row")
    assert "query-5" in made.engine.unsupported(parse_policy("row"))
    prompt = behind_header(23, 31)
    made.cache(prompt)
    made.engine.expect_together(prompt.chunks, tenant="default")
    rest(made)
    assert places_of(made, prompt) == [[0], [0]]


def test_a_chunk_is_deleted_at_all_places():
    first = "0" * 64
    assert len(with_places([first])) == ROW
    assert with_places([first]) == {first, *place_keys(first)}
