"""Answers from chunks that are still being read are those from memory, whatever happens to the
reading."""

import threading
from functools import partial

import pytest

from kvlinker.base.errors import EngineClosedError
from kvlinker.base.events import ChunkDamaged, ChunkLoaded, ChunkLookup
from kvlinker.engines.embedded.chunks.prompt_loader import PromptLoader
from kvlinker.engines.embedded.engine import LOADERS
from kvlinker.engines.embedded.requests.generation import PromptRequest
from kvlinker.store import DiskTier, HostTier
from kvlinker.store.chunk_kv import LayerLostError
from kvlinker.store.loading import bandwidths as bandwidth
from kvlinker.store.remote.objects import object_tier
from tests.engines.embedded.conftest import Bench, linked_prompt
from tests.waiting import PATIENCE, wait_until

PLENTY = 1 << 28
POLICIES = [
    "naive",
    "legolink-4",
    "h2o-30",
    "cacheblend-20",
    "cacheblend-auto-30",
    "query-10",
    "cachecraft-0.7",
]
lose = PromptRequest.lose
PROMPT = linked_prompt(40, 33, 21, middle=3)


@pytest.fixture(autouse=True)
def reading_only_waits(monkeypatch):
    """Here, reading is never taken for work that computing could not hide."""
    monkeypatch.setattr(bandwidth, "BUSY_SHARE", 1e9)


class GatedReader:
    """Waits before every layer until it may be read."""

    def __init__(self, reader, tier):
        self._reader = reader
        self._tier = tier
        self.layers, self.tokens, self.contexts = reader.layers, reader.tokens, reader.contexts
        self.nbytes, self.scores, self.states = reader.nbytes, reader.scores, reader.states

    def read(self, layer):
        with self._tier.changed:
            self._tier.reached = max(self._tier.reached, layer)
            self._tier.changed.notify_all()
            assert self._tier.changed.wait_for(lambda: layer < self._tier.readable, PATIENCE)
        if layer in self._tier.unreadable:
            raise LayerLostError("as the test wants")
        return self._reader.read(layer)

    def close(self):
        with self._tier.changed:
            self._tier.open_readers -= 1
            self._tier.changed.notify_all()
        self._reader.close()


class LayerGatedTier(HostTier):
    """Keeps what it was given, and delivers the layers that the test lets through."""

    def __init__(self, events):
        super().__init__(PLENTY, events, name="slow")
        self.changed = threading.Condition()
        self.readable = 10**6
        self.unreadable = ()
        self.reached = -1
        self.open_readers = 0

    def open(self, key):
        reader = super().open(key)
        if reader is None:
            return None
        with self.changed:
            self.open_readers += 1
        return GatedReader(reader, self)

    def let(self, readable):
        with self.changed:
            self.readable = readable
            self.changed.notify_all()

    def wait_until_reached(self, layer):
        with self.changed:
            assert self.changed.wait_for(lambda: self.reached >= layer, PATIENCE)

    def wait_until_closed(self):
        with self.changed:
            assert self.changed.wait_for(lambda: not self.open_readers, PATIENCE)

    def close(self):
        """As a persistent tier."""


def disk(tmp_path, events):
    return [DiskTier(tmp_path / "chunks", PLENTY, events)]


def objects(tmp_path, events):
    return [object_tier(f"file://{tmp_path}/objects", PLENTY, events)]


def expect_pipelining(made):
    """As if the tiers, and the computation, had been measured: one layer suffices to begin."""
    for tier in ("disk", "object", "slow"):
        made.store.bandwidths.note(tier, 1 << 40, 1e-3)


def wait_until_running(made):
    """A step is under way, or about to be."""
    wait_until(lambda: made.engine.current_load().running)


def wait_for(seen, count):
    wait_until(lambda: len(seen) >= count)


def let_time_pass_until(made, condition):
    """As much as it takes for what does not come to be too late."""

    def true_by_now():
        made.clock.advance(0.1)
        return condition()

    wait_until(true_by_now)


def recorded(made, kind):
    seen = []
    made.events.subscribe(lambda event: seen.append(event) if isinstance(event, kind) else None)
    return seen


def behind_a_gate(bench, **options):
    """An engine whose slow tier holds the prompt's chunks, and whose host is empty; with that
    tier."""
    tiers = []

    def slower(events):
        tiers.append(LayerGatedTier(events))
        return tiers

    made = bench(slower=slower, **options)
    made.cache(PROMPT)
    made.store.flush()
    forget_host(made)
    expect_pipelining(made)
    return made, tiers[0]


@pytest.fixture
def gated(bench):
    """See ``behind_a_gate``."""
    made, tier = behind_a_gate(bench)
    yield made, tier
    tier.let(10**6)


def recorded_steps(made):
    """The batches of all steps from now on."""
    steps, step = [], made.engine.runner.step

    def noted(batch, wait):
        steps.append(batch)
        return step(batch, wait)

    made.engine.runner.step = noted
    return steps


def forget_host(made):
    host = made.store._tiers[0]
    keys = host.keys()
    for key in keys:
        host.delete(key)


@pytest.fixture(scope="module")
def expected():
    """Answers from memory, by policy."""
    made = Bench()
    made.cache(PROMPT)
    answers = {policy: made.answer(PROMPT, policy) for policy in POLICIES}
    made.close()
    return {policy: (answer.tokens, answer.logprobs) for policy, answer in answers.items()}


@pytest.mark.parametrize("tier", [disk, objects])
@pytest.mark.parametrize("policy", POLICIES)
def test_answers_from_slower_tiers_are_those_from_memory(bench, tmp_path, tier, policy):
    first = bench(slower=partial(tier, tmp_path))
    first.cache(PROMPT)
    first.store.flush()
    from_memory = first.answer(PROMPT, policy)
    second = bench(slower=partial(tier, tmp_path))
    second.answer(linked_prompt(8, seed=9), max_tokens=1)  # measures the pace
    second.store.flush()
    expect_pipelining(second)
    lookups = recorded(second, ChunkLookup)
    answer = second.answer(PROMPT, policy)
    assert (answer.tokens, answer.logprobs) == (from_memory.tokens, from_memory.logprobs)
    wait_for(lookups, 3)
    assert [lookup.hit for lookup in lookups] == [True] * 3


def test_the_step_begins_with_the_first_layer_and_waits_for_the_others(gated, expected):
    made, tier = gated
    tier.let(1)
    outcome, _ = made.submit(PROMPT)
    wait_until_running(made)
    tier.wait_until_reached(1)
    assert outcome.events.empty()
    tier.let(10**6)
    assert outcome.wait().tokens == expected["legolink-4"][0]


def test_what_was_loaded_is_in_memory_for_the_next_request(gated):
    made, _ = gated
    loaded = recorded(made, ChunkLoaded)
    made.answer(PROMPT, max_tokens=1)
    wait_for(loaded, 3)
    made.answer(PROMPT, max_tokens=1)
    assert sorted(event.tier for event in loaded) == ["host"] * 3 + ["slow"] * 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_that_is_lost_in_the_middle_of_a_step_is_computed(
    gated, expected, policy, monkeypatch
):
    made, tier = gated
    lost = []

    def losing(request):
        lost.append(request)
        lose(request)

    monkeypatch.setattr(PromptRequest, "lose", losing)
    tier.let(1)
    tier.unreadable = (1,)
    outcome, _ = made.submit(PROMPT, policy)
    wait_until_running(made)
    tier.let(10**6)
    outcome.wait()
    assert outcome.failed is None
    assert len(lost) == 1
    assert outcome.tokens == expected[policy][0]
    assert outcome.logprobs == pytest.approx(expected[policy][1], abs=1e-3)


def test_a_stall_ends_with_patience(gated, expected):
    made, tier = gated
    tier.let(1)
    outcome, _ = made.submit(PROMPT)
    tier.wait_until_reached(1)
    wait_until_running(made)
    assert outcome.events.empty()
    let_time_pass_until(made, lambda: not outcome.events.empty())
    assert outcome.wait().tokens == expected["legolink-4"][0]
    assert tier.reached == 1


def test_a_stall_before_the_first_layer_is_given_up(gated, expected):
    made, tier = gated
    tier.let(0)
    made.answer(linked_prompt(8, seed=9), max_tokens=1)  # measures the pace
    outcome, _ = made.submit(PROMPT)
    tier.wait_until_reached(0)
    let_time_pass_until(made, lambda: not outcome.events.empty())
    assert outcome.wait().tokens == expected["legolink-4"][0]


def test_others_of_the_step_do_not_suffer(gated, expected):
    made, tier = gated
    other = linked_prompt(25, 18, seed=5)
    made.cache(other)
    alone = made.answer(other).tokens
    tier.let(1)
    late, others = [], []
    with made.held() as held:
        for _ in range(2):
            late.append(made.submit(PROMPT)[0])
            others.append(made.submit(other)[0])
        held.wait_until_ready(4)
    assert [outcome.wait().tokens for outcome in others] == [alone] * 2
    assert all(outcome.events.empty() for outcome in late)
    let_time_pass_until(made, lambda: not any(outcome.events.empty() for outcome in late))
    assert [outcome.wait().tokens for outcome in late] == [expected["legolink-4"][0]] * 2


def test_damage_in_a_middle_layer_is_computed_again(bench, tmp_path, expected):
    first = bench(slower=partial(disk, tmp_path))
    first.cache(PROMPT)
    first.store.flush()
    for path in (tmp_path / "chunks").glob("*/*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-len(data) // 3] ^= 1
        path.write_bytes(data)
    second = bench(slower=partial(disk, tmp_path))
    expect_pipelining(second)
    damages = recorded(second, ChunkDamaged)
    outcome = second.answer(PROMPT)
    assert outcome.tokens == expected["legolink-4"][0]
    assert {damage.tier for damage in damages} == {"disk"}
    assert len(damages) == 3
    assert "does not match its checksum" in damages[0].reason


@pytest.mark.parametrize("layers", [0, 1])
def test_cancelling_while_layers_come(gated, layers):
    made, tier = gated
    tier.let(layers)
    outcome, handle = made.submit(PROMPT)
    tier.wait_until_reached(layers)
    handle.cancel()
    if layers:
        tier.let(10**6)
    assert outcome.wait().finished.reason == "cancelled"
    tier.let(10**6)


def test_a_request_that_ends_before_its_load_begins_has_nothing_computed(bench):
    made = bench()
    steps = recorded_steps(made)
    loaders_go_on = threading.Event()
    for _ in range(LOADERS):
        made.engine._loaders.submit(loaders_go_on.wait)
    outcome, handle = made.submit(PROMPT)
    handle.cancel()
    assert outcome.wait().finished.reason == "cancelled"
    loaders_go_on.set()
    made.settle()
    assert not steps


def test_chunks_that_are_late_for_a_request_that_has_ended_are_not_computed(gated):
    made, tier = gated
    steps = recorded_steps(made)
    tier.let(0)
    outcome, handle = made.submit(PROMPT)
    tier.wait_until_reached(0)
    handle.cancel()
    assert outcome.wait().finished.reason == "cancelled"
    let_time_pass_until(made, lambda: made.engine.scheduler.idle)
    made.settle()
    assert not steps


def test_layers_that_come_for_a_request_that_has_ended_are_not_read_to_the_end(gated, monkeypatch):
    """The request ends before the first layers are there, with which it would begin."""
    complete, completed, requests = PromptLoader._complete, threading.Event(), []

    def completing(loader, request, *args):
        complete(loader, request, *args)
        requests.append(request)
        completed.set()

    monkeypatch.setattr(PromptLoader, "_complete", completing)
    made, tier = gated
    tier.let(0)
    outcome, handle = made.submit(PROMPT)
    tier.wait_until_reached(0)
    handle.cancel()
    assert outcome.wait().finished.reason == "cancelled"
    tier.let(1)
    assert completed.wait(PATIENCE)
    (request,) = requests
    assert (request.link, request.sequence) == (None, None), "they would keep the KV in memory"
    tier.let(10**6)
    tier.wait_until_closed()
    assert tier.reached <= 1, "the last of three layers is not read"


@pytest.mark.parametrize("layers", [0, 1])
def test_closing_while_layers_come(gated, layers):
    made, tier = gated
    before = set(threading.enumerate())
    tier.let(layers)
    outcome, _ = made.submit(PROMPT)
    tier.wait_until_reached(layers)
    closing = threading.Thread(target=made.engine.close)
    closing.start()
    wait_until(lambda: not made.engine.healthy)
    tier.let(10**6)
    closing.join(PATIENCE)
    outcome.wait()
    assert outcome.failed is None or isinstance(outcome.failed.error, EngineClosedError)
    made.store.close()
    assert tier.open_readers == 0
    after = set(threading.enumerate())
    assert len(after) <= len(before)
    assert not [thread for thread in after - before if thread.name.startswith("kvlinker-l")]
