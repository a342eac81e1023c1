"""Prefixes that the pool gives up go to disk, and answers do not depend on what comes back from
there."""

from __future__ import annotations

import numpy as np
import pytest

from kvlinker.base.events import PrefixRestored, PrefixSpilled
from kvlinker.base.futures import completed
from kvlinker.base.types.chunks import Chunk
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt
from kvlinker.store import DiskTier
from kvlinker.store.prefixes import SpilledPrefixes
from tests.engines.embedded.conftest import random_tokens
from tests.store.store_chunks import Recorder
from tests.waiting import wait_until

TOLERANCE = 1e-5
CHUNK = Chunk(random_tokens(33, 7))
HEADER, QUESTION, MORE = random_tokens(40, 1), random_tokens(21, 2), random_tokens(14, 3)


def prompt_of(*fresh):
    """A prompt with a chunk behind the first fresh tokens."""
    first, *others = [FreshSegment(tuple(tokens)) for tokens in fresh]
    return Prompt((first, CachedSegment(CHUNK), *others))


@pytest.fixture
def spilling(bench, tmp_path, monkeypatch):
    """Makes engines with room for little beside one prompt, which find everything worth keeping."""
    monkeypatch.setattr(SpilledPrefixes, "pays", lambda self, nbytes, seconds: True)

    def make(family="llama", disk_bytes=1 << 26, **options):
        def slower(events):
            return [DiskTier(tmp_path, disk_bytes, events)]

        made = bench(family, slower=slower, prefix_cache="on", kv_slots=250, **options)
        made.recorder = Recorder()
        made.events.subscribe(made.recorder.seen.append)
        return made

    return make


def flood(made, tenant="another"):
    """Fill the pool, and wait until what that pushed out is on disk."""
    made.submit(Prompt((FreshSegment(random_tokens(240, 5)),)), "full", tenant, max_tokens=2)[
        0
    ].wait()
    made.store._prefixes.flush()


def assert_alike(outcome, cold):
    assert outcome.failed is None, outcome.failed
    assert outcome.tokens == cold.tokens
    np.testing.assert_allclose(outcome.logprobs, cold.logprobs, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("llama", "full"),
        ("llama", "legolink-4"),
        ("llama", "naive"),
        ("gemma3", "full"),
        ("gpt_oss-sinks", "full"),
        ("deepseek_v3-latents-interleaved", "legolink-4"),
    ],
)
def test_a_conversation_goes_on_from_disk(bench, spilling, family, policy):
    made, cold = spilling(family, max_step_tokens=37), bench(family)
    first = prompt_of(HEADER, QUESTION)
    answer = made.answer(first, policy)
    assert_alike(answer, cold.answer(first, policy))
    second = prompt_of(HEADER, (*QUESTION, *answer.tokens, *MORE))
    for _ in range(2):
        flood(made)
        outcome = made.answer(second, policy)
        assert outcome.finished.usage.exact_cached_tokens >= len(first)
        assert outcome.finished.usage.prompt_tokens == len(second)
        assert_alike(outcome, cold.answer(second, policy))
    spilled, restored = made.recorder.of(PrefixSpilled), made.recorder.of(PrefixRestored)
    assert sum(event.tokens for event in spilled) >= sum(event.tokens for event in restored) / 2 > 0
    assert made.store.spilled_bytes > 0


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("llama", "full"),
        ("llama", "legolink-4"),
        ("llama", "query-10"),
        ("gemma3", "naive"),
        ("gpt_oss-sinks", "full"),
        ("deepseek_v3-latents-interleaved", "legolink-4"),
    ],
)
def test_the_next_process_goes_on_from_what_one_has_left(bench, spilling, family, policy):
    made, cold = spilling(family, max_step_tokens=37), bench(family)
    prompt = prompt_of(HEADER, QUESTION)
    other = prompt_of(HEADER, MORE)
    flood(made)
    for asked in (other, prompt):
        assert_alike(made.answer(asked, policy), cold.answer(asked, policy))
    for stranger in ("third", "fourth"):
        made.close()
        made = spilling(family, max_step_tokens=37)
        for asked in (prompt, other):
            outcome = made.answer(asked, policy)
            assert outcome.finished.usage.exact_cached_tokens == len(asked) - 1
            assert_alike(outcome, cold.answer(asked, policy))
        outcome, _ = made.submit(prompt, policy, stranger)
        assert outcome.wait().finished.usage.exact_cached_tokens == 0
    assert sum(event.tokens for event in made.recorder.of(PrefixRestored)) > 0


def test_what_was_used_last_is_left_where_there_is_little_room(spilling, tmp_path):
    first = spilling()
    first.answer(Prompt((FreshSegment(random_tokens(40, 6)),)), "full")
    first.close()
    (file,) = tmp_path.glob("prefixes/*/*/*.safetensors")
    room = 3 * file.stat().st_size
    file.unlink()
    prompts = [Prompt((FreshSegment(random_tokens(40, seed)),)) for seed in range(10, 15)]
    made = spilling(disk_bytes=room)
    for prompt in prompts:
        made.answer(prompt, "full", max_tokens=1)
    made.answer(prompts[0], "full", max_tokens=1)
    made.close()
    made = spilling(disk_bytes=room)
    usages = [made.answer(prompt, "full", max_tokens=1).finished.usage for prompt in prompts]
    found = [usage.exact_cached_tokens == 39 for usage in usages]
    assert (found[0], found[-1]) == (True, True), found
    assert not all(found)


def test_a_prompt_that_a_shutdown_cuts_off_goes_on_in_the_next_process(bench, spilling):
    made, cold = spilling(max_step_tokens=16), bench()
    prompt = Prompt((FreshSegment(random_tokens(200, 6)),))
    with made.held():
        outcome, _ = made.submit(prompt, "full")
    wait_until(lambda: made.engine.current_load().running)
    made.engine.close()
    assert outcome.wait().failed is not None
    made.store.close()
    again = spilling().answer(prompt, "full")
    assert 0 < again.finished.usage.exact_cached_tokens < len(prompt) - 1
    assert_alike(again, cold.answer(prompt, "full"))


@pytest.mark.parametrize("harm", ["damaged", "gone", "note damaged", "note gone", "another model"])
def test_what_is_left_and_lost_is_computed(bench, spilling, tmp_path, harm):
    made, cold = spilling(), bench()
    prompt = prompt_of(HEADER, QUESTION)
    made.answer(prompt, "legolink-4")
    made.close()
    (left,) = (tmp_path / "prefixes").iterdir()
    name = "note" if "note" in harm else "*/*.safetensors"
    for path in list(left.glob(name)):
        if "gone" in harm:
            path.unlink()
        elif "damaged" in harm:
            *others, last = path.read_bytes()
            path.write_bytes(bytes([*others, last ^ 1]))
    changes = {"changes": {"rms_norm_eps": 1e-3}} if harm == "another model" else {}
    again, cold = spilling(**changes), bench(**changes)
    outcome = again.answer(prompt, "legolink-4")
    assert outcome.finished.usage.fresh_tokens >= len(HEADER) + len(QUESTION)
    assert_alike(outcome, cold.answer(prompt, "legolink-4"))


def test_an_engine_that_failed_leaves_nothing(spilling, tmp_path, monkeypatch):
    made = spilling()
    prompt = prompt_of(HEADER, QUESTION)
    made.answer(prompt, "full")
    monkeypatch.setattr(made.engine.scheduler, "next_step", lambda: 1 / 0)
    outcome, _ = made.submit(prompt, "full")
    assert outcome.wait().failed is not None
    made.close()
    assert list((tmp_path / "prefixes").iterdir()) == []


def test_what_is_on_disk_is_written_once(spilling):
    made = spilling()
    prompt = prompt_of(HEADER, QUESTION)
    made.answer(prompt, "full")
    for turn in range(3):
        flood(made)
        own = [event for event in made.recorder.of(PrefixSpilled) if event.tokens < 200]
        assert sum(event.tokens for event in own) == len(prompt), f"turn {turn}"
        assert made.answer(prompt, "full").finished.usage.exact_cached_tokens == len(prompt) - 1


def test_other_tenants_find_nothing(spilling):
    made = spilling()
    prompt = prompt_of(HEADER, QUESTION)
    made.answer(prompt, "full")
    flood(made)
    outcome, _ = made.submit(prompt, "full", "third")
    assert outcome.wait().finished.usage.cached_tokens == 0
    assert made.answer(prompt, "full").finished.usage.exact_cached_tokens == len(prompt) - 1


@pytest.mark.parametrize("policy", ["legolink-4", "cacheblend-40"])
@pytest.mark.parametrize("harm", ["damaged", "gone", "late"])
def test_what_does_not_come_back_is_computed(bench, spilling, tmp_path, monkeypatch, harm, policy):
    made, cold = spilling(), bench()
    prompt = prompt_of(HEADER, QUESTION)
    expected = made.answer(prompt, policy)
    assert_alike(expected, cold.answer(prompt, policy))
    flood(made)
    if harm == "late":
        monkeypatch.setattr(
            SpilledPrefixes, "load", lambda self, keys, seconds: [completed(None) for _ in keys]
        )
    else:
        for path in tmp_path.glob("prefixes/*/*/*.safetensors"):
            if harm == "gone":
                path.unlink()
            else:
                *others, last = path.read_bytes()
                path.write_bytes(bytes([*others, last ^ 1]))
    outcome = made.answer(prompt, policy)
    usage = outcome.finished.usage
    assert usage.prompt_tokens == len(prompt)
    assert usage.fresh_tokens >= len(HEADER)
    assert usage.recomputed_tokens >= 0
    assert_alike(outcome, cold.answer(prompt, policy))


def test_nothing_is_spilled_that_does_not_pay(spilling, monkeypatch):
    made = spilling()
    monkeypatch.setattr(SpilledPrefixes, "pays", lambda self, nbytes, seconds: False)
    prompt = prompt_of(HEADER, QUESTION)
    made.answer(prompt, "full")
    flood(made)
    assert made.answer(prompt, "full").finished.usage.cached_tokens == 0
    assert not made.recorder.of(PrefixSpilled)


def test_a_full_disk_keeps_no_prefix(spilling):
    made = spilling(disk_bytes=40_000)
    prompt = prompt_of(HEADER, QUESTION)
    made.answer(prompt, "naive")
    flood(made)
    assert made.answer(prompt, "naive").finished.usage.exact_cached_tokens == 0
    assert made.store.tier_of(made.engine._loader.keys([CHUNK], "default")[0]) == "host"


def test_requests_that_are_cut_off_leave_nothing_wrong(bench, spilling):
    made, cold = spilling(max_step_tokens=16), bench()
    prompt = prompt_of(HEADER, QUESTION)
    for _ in range(3):
        flood(made)
        outcome, handle = made.submit(prompt, "full", max_tokens=100)
        outcome.wait_for_token()
        handle.cancel()
        outcome.wait()
        flood(made)
        assert_alike(made.answer(prompt, "full"), cold.answer(prompt, "full"))
