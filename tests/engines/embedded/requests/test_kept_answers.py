"""The KV of answers, as they were generated, against that of the same tokens computed as a text."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.types.chunks import Chunk, Origin, chunk_key
from kvlinker.engines.embedded.execution.capturing import AnswerCapture, RecordingRoom
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt
from kvlinker.store.chunk_kv import LayerKV
from tests.engines.embedded.conftest import linked_prompt, random_tokens
from tests.engines.embedded.frozen_reference import frozen_answer
from tests.waiting import PATIENCE

FAMILIES = [
    "llama",
    "llama3-rope",
    "mistral-window",
    "gemma2-softcap",
    "gpt_oss-sinks",
    "gemma4-shared-two-sizes",
    "gemma3n-shared",
    "deepseek_v3-latents-interleaved",
    "deepseek_v32-picks",
    "minimax_m3-blocks",
]


def keep(bench, prompt, policy, **sampling):
    """The answer's outcome, and its chunk, whose KV is put into the store."""
    outcome = bench.answer(prompt, policy, keeps=True, **sampling)
    answer = outcome.finished.answer_kv
    assert answer.tokens.tolist() == outcome.tokens
    assert answer.prompt.tolist() == prompt.tokens.tolist()
    origin = Origin.LINKED_ANSWER if answer.linked else Origin.ANSWER
    chunk = Chunk(tuple(outcome.tokens), tuple(prompt.tokens.tolist()), origin=origin)
    key = chunk_key(chunk, fingerprint=bench.engine.fingerprint, tenant="default")
    kv = answer.part(0, len(outcome.tokens))
    bench.store.put(key, kv)
    return outcome, chunk, kv


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [7, 64])
def test_an_answers_kv_is_that_of_its_tokens(bench, family, steps):
    """Behind a prompt that is computed as it is, whatever the steps: with that answer's KV, the
    conversation goes on as it does without any."""
    made = bench(family, max_step_tokens=steps)
    prompt = Prompt((FreshSegment(random_tokens(61, 1)),))
    _, chunk, kv = keep(made, prompt, "naive", max_tokens=23)
    assert chunk.origin is Origin.ANSWER
    computed = Chunk(chunk.tokens, chunk.prefix)
    made.engine.cache_chunk(computed, tenant="other").result(timeout=PATIENCE)
    key = chunk_key(computed, fingerprint=made.engine.fingerprint, tenant="other")
    expected = made.store.get_computed(key)
    for one, other in zip(kv.layers, expected.layers, strict=True):
        for ours, theirs in zip(one.parts, other.parts, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    more = random_tokens(9, 2)
    whole = Prompt((*prompt.segments, FreshSegment(chunk.tokens), FreshSegment(more)))
    again = Prompt((*prompt.segments, CachedSegment(chunk), FreshSegment(more)))
    in_full = made.answer(whole, "full")
    linked = made.answer(again, "naive")
    assert linked.tokens == in_full.tokens
    np.testing.assert_allclose(linked.logprobs, in_full.logprobs, atol=3e-5)
    assert linked.finished.usage.cached_tokens == 23


@pytest.mark.parametrize("family", ["llama", "gemma2-softcap"])
@pytest.mark.parametrize("repaired", [0, 4])
def test_an_answer_stands_elsewhere_as_it_was_generated(bench, family, repaired):
    """It is that of transformers' own forward pass, in which the hidden states of its tokens are
    those that they had behind the prompt that it answered."""
    made = bench(family)
    _, chunk, _ = keep(made, Prompt((FreshSegment(random_tokens(61, 1)),)), "naive", max_tokens=23)
    fresh = (FreshSegment(random_tokens(17, 2)), FreshSegment(random_tokens(9, 3)))
    elsewhere = Prompt((fresh[0], CachedSegment(chunk), fresh[1]))
    mask = np.zeros(len(elsewhere), dtype=bool)
    mask[elsewhere.spans[0].start :][:repaired] = True
    policy = f"legolink-{repaired}" if repaired else "naive"
    answer = made.answer(elsewhere, policy, max_tokens=4)
    tokens, logprobs = frozen_answer(family, elsewhere, [mask], len(answer.tokens))
    assert answer.finished.usage.recomputed_tokens == repaired
    assert answer.tokens == tokens
    np.testing.assert_allclose(answer.logprobs, logprobs, atol=5e-5)


@pytest.mark.parametrize("policy", ["naive", "legolink-4"])
def test_an_answer_behind_linked_chunks_keeps_what_they_were(bench, policy):
    """Its KV is that of the same tokens where some of them were the prompt's, linked alike."""
    made = bench()
    prompt = linked_prompt(33, 47, header=3, seed=4)
    made.cache(prompt)
    _, chunk, kv = keep(made, prompt, policy, max_tokens=20)
    assert chunk.origin is Origin.LINKED_ANSWER
    longer = Prompt((*prompt.segments, FreshSegment(chunk.tokens[:8])))
    _, rest, expected = keep(made, longer, policy, max_tokens=12)
    assert rest.tokens == chunk.tokens[8:]
    for one, other in zip(kv.layers, expected.layers, strict=True):
        torch.testing.assert_close(one.key[:, 8:], other.key, atol=3e-5, rtol=0)
        torch.testing.assert_close(one.value[:, 8:], other.value, atol=3e-5, rtol=0)
    again = Prompt((*prompt.segments, CachedSegment(chunk), FreshSegment(random_tokens(9, 2))))
    assert not again.spans[-1].exact


@pytest.mark.parametrize("policy", ["query-10", "cacheblend-20", "naive", "full"])
def test_only_what_is_computed_as_it_is_is_told_so(bench, policy):
    made = bench()
    prompt = linked_prompt(33, 47, header=3, seed=4)
    made.cache(prompt)
    _, chunk, _ = keep(made, prompt, policy, max_tokens=3)
    assert (chunk.origin is Origin.ANSWER) == (policy == "full")


def test_what_ends_an_answer_is_no_part_of_it(bench):
    made = bench()
    prompt = Prompt((FreshSegment(random_tokens(40, 3)),))
    tokens = made.answer(prompt, "full", max_tokens=12).tokens
    stopping = tokens.index(tokens[-1])
    ended = made.answer(prompt, "full", max_tokens=12, keeps=True, stop_token_ids=(tokens[-1],))
    assert ended.finished.reason == "stop"
    assert ended.finished.answer_kv.tokens.tolist() == tokens[:stopping]
    assert ended.finished.usage.output_tokens == stopping + 1


@pytest.mark.whole
def test_several_answers_are_kept_at_once_and_after_preemptions(bench):
    alone = bench(kv_slots=8192)
    prompts = [linked_prompt(seed=seed, fresh=60 + seed) for seed in range(6)]
    expected = [keep(alone, prompt, "full", max_tokens=100) for prompt in prompts]
    made = bench(max_step_tokens=64, kv_slots=400)
    with made.held() as held:
        outcomes = [
            made.submit(prompt, "full", max_tokens=100, keeps=True)[0] for prompt in prompts
        ]
        held.wait_until_ready(len(outcomes))
    for outcome, (single, _, kv) in zip(outcomes, expected, strict=True):
        answer = outcome.wait().finished.answer_kv
        assert outcome.tokens == single.tokens
        for one, other in zip(answer.part(0, 100).layers, kv.layers, strict=True):
            torch.testing.assert_close(one.key, other.key, atol=3e-5, rtol=0)
            torch.testing.assert_close(one.value, other.value, atol=3e-5, rtol=0)
    assert made.engine.scheduler.preemptions > 0


def test_a_cancelled_answer_has_no_kv(bench):
    made = bench()
    outcome, handle = made.submit(linked_prompt(seed=1), "full", max_tokens=1900, keeps=True)
    outcome.wait_for_token()
    handle.cancel()
    assert outcome.wait().finished.reason == "cancelled"
    assert outcome.finished.answer_kv is None


@given(st.data())
def test_runs_in_any_order_of_work_join_to_the_whole(data):
    """Runs come in order, but a preemption begins again at an earlier position."""
    tokens, start = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 7))
    whole = torch.arange(tokens * 6.0).reshape(2, tokens, 3)
    room = RecordingRoom(1 << 20)
    capture = AnswerCapture(1, start, room)
    position, again = 0, data.draw(st.integers(0, 3))
    while position < tokens:
        end = data.draw(st.integers(position + 1, tokens))
        part = whole[:, position:end]
        capture.record(0, start + position, LayerKV(part, -part))
        position = end
        if again and data.draw(st.booleans()):
            again -= 1
            position = 0
    assert capture.tokens == tokens
    first = data.draw(st.integers(0, tokens - 1))
    last = data.draw(st.integers(first + 1, tokens))
    (layer,) = capture.part(first, last).layers
    torch.testing.assert_close(layer.key, whole[:, first:last])
    torch.testing.assert_close(layer.value, -whole[:, first:last])
    assert room.used_bytes == 2 * whole.nbytes
    del capture
    assert room.used_bytes == 0


def test_answers_share_the_room_for_what_is_kept():
    """One that finds none gives up what it took, and tells so by having too few tokens."""
    part = torch.zeros(2, 1, 3)
    room = RecordingRoom(4 * 2 * part.nbytes)
    first, second = AnswerCapture(1, 0, room), AnswerCapture(1, 0, room)
    for token in range(2):
        first.record(0, token, LayerKV(part, part))
        second.record(0, token, LayerKV(part, part))
    first.record(0, 2, LayerKV(part, part))
    assert (first.tokens, second.tokens) == (0, 2)
    second.record(0, 2, LayerKV(part, part))
    first.record(0, 3, LayerKV(part, part))
    assert (first.tokens, second.tokens) == (0, 3)
    assert room.used_bytes == 3 * 2 * part.nbytes


def test_an_answer_without_room_is_given_and_not_kept(bench):
    made = bench(host_memory=0)
    outcome = made.answer(Prompt((FreshSegment(random_tokens(9, 1)),)), "full", keeps=True)
    assert outcome.tokens
    assert outcome.finished.answer_kv is None
