"""cacheblend-auto: what loading hides is computed again, by what was measured of the tier and of
the model."""

import numpy as np
import pytest

from kvlinker.base.events import ChunkLookup
from kvlinker.base.types.chunks import chunk_key
from kvlinker.store import HostTier
from tests.engines.embedded.chunks.test_layer_loading import forget_host, recorded, wait_for
from tests.engines.embedded.conftest import full_forward, linked_prompt
from tests.waiting import wait_until

PLENTY = 1 << 28
PROMPT = linked_prompt(140, 133, 121, header=3, middle=3)
UNEVEN = linked_prompt(300, 20, 20, header=3)


class SlowTier(HostTier):
    """Keeps what it is given; that it is slow is what the test says of its bandwidth."""

    def __init__(self, events):
        super().__init__(PLENTY, events, name="slow")
        self.opened = 0

    def open(self, key):
        self.opened += 1
        return super().open(key)


@pytest.fixture
def slow(bench):
    """An engine whose host is empty and whose slow tier holds the prompts' chunks; with that
    tier."""
    tiers = []

    def slower(events):
        tiers.append(SlowTier(events))
        return tiers

    made = bench(slower=slower)
    for prompt in (PROMPT, UNEVEN):
        made.cache(prompt)
    made.store.flush()
    forget_host(made)
    tiers[0].opened = 0
    return made, tiers[0]


def keys_of(made, prompt):
    return [
        chunk_key(chunk, fingerprint=made.loaded.fingerprint, tenant="default")
        for chunk in prompt.chunks
    ]


def let_loading_take(made, prompt, share, busy=0.0):
    """As if the slow tier had been measured: loading the prompt's chunks takes this share of
    computing them, and keeps a processor busy for a share of that time."""
    nbytes = sum(made.store.nbytes(key) for key in keys_of(made, prompt))
    seconds = share * made.engine.prefill_seconds(int(prompt.cached.sum()))
    for _ in range(10):
        made.store.bandwidths.note("slow", nbytes, seconds, busy * seconds)


def percent_of(explanation):
    family, percent = explanation.settled.split("-")
    assert family == "cacheblend"
    return float(percent)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_what_loading_hides_is_recomputed(slow, share):
    made, _ = slow
    let_loading_take(made, PROMPT, share)
    explanation = made.explain(PROMPT, "cacheblend-auto")
    assert explanation.policy == "cacheblend-auto"
    forecast = explanation.forecast
    assert percent_of(explanation) == pytest.approx(
        100 * forecast.load / forecast.prefill, abs=0.051
    )
    assert percent_of(explanation) == pytest.approx(100 * share, rel=0.2)
    described = explanation.to_json()
    assert described["settled_policy"] == explanation.settled
    assert described["forecast"] == {
        "load_s": forecast.load,
        "prefill_s": forecast.prefill,
        "overlaps": True,
    }


def test_the_answer_is_that_of_the_ratio_that_was_chosen(slow):
    made, _ = slow
    let_loading_take(made, PROMPT, 0.5)
    answer = made.answer(PROMPT, "cacheblend-auto")
    chosen = round(100 * answer.finished.usage.recomputed_fraction)
    assert 40 <= chosen <= 60
    at_least = made.answer(PROMPT, "cacheblend-15")
    assert at_least.finished.usage.recomputed_tokens < answer.finished.usage.recomputed_tokens


def test_reading_that_needs_the_computations_processors_hides_nothing(slow):
    made, _ = slow
    let_loading_take(made, PROMPT, 0.5, busy=0.5)
    explanation = made.explain(PROMPT, "cacheblend-auto")
    assert explanation.settled == "cacheblend-15"
    assert not explanation.forecast.overlaps
    assert explanation.to_json()["forecast"]["overlaps"] is False


def test_memory_hides_nothing(slow):
    made, _ = slow
    let_loading_take(made, PROMPT, 0.5)
    made.store.load_ahead(keys_of(made, PROMPT))
    wait_for_host(made, PROMPT)
    explanation = made.explain(PROMPT, "cacheblend-auto-20")
    assert explanation.settled == "cacheblend-20"
    assert explanation.forecast.load == 0


def test_what_is_not_measured_hides_nothing(slow):
    made, _ = slow
    explanation = made.explain(PROMPT, "cacheblend-auto")
    assert explanation.settled == "cacheblend-15"
    assert explanation.forecast.load is None


def test_what_is_nowhere_hides_nothing_and_comes_back(slow):
    made, tier = slow
    let_loading_take(made, PROMPT, 0.5)
    for key in keys_of(made, PROMPT):
        tier.delete(key)
    assert made.explain(PROMPT, "cacheblend-auto").settled == "cacheblend-15"
    assert all(made.store.tier_of(key) == "host" for key in keys_of(made, PROMPT))


def test_other_policies_have_no_forecast(slow):
    made, _ = slow
    explanation = made.explain(PROMPT, "cacheblend-15")
    assert (explanation.settled, explanation.forecast) == ("cacheblend-15", None)


def test_loading_that_takes_longer_than_computing_is_left_out_and_the_answer_exact(slow):
    made, tier = slow
    let_loading_take(made, PROMPT, 3.0)
    lookups = recorded(made, ChunkLookup)
    tokens, logprobs = full_forward("llama", PROMPT, 8)
    opened = []
    load_ahead = made.store.load_ahead

    def noted(keys):
        opened.append((tier.opened, keys))
        load_ahead(keys)

    made.store.load_ahead = noted
    answer = made.answer(PROMPT, "cacheblend-auto")
    assert answer.tokens == tokens
    np.testing.assert_allclose(answer.logprobs, logprobs, atol=2e-5)
    assert answer.finished.usage.recomputed_fraction == 1
    assert opened == [(0, keys_of(made, PROMPT))]  # nothing but for the next time
    wait_for(lookups, 3)
    wait_for_host(made, PROMPT)
    assert made.explain(PROMPT, "cacheblend-auto").settled == "cacheblend-15"


def test_everything_is_computed_where_the_least_ratio_says_so(slow):
    made, _ = slow
    let_loading_take(made, PROMPT, 0.5)
    tokens, _ = full_forward("llama", PROMPT, 8)
    assert made.answer(PROMPT, "cacheblend-auto-100").tokens == tokens


def test_the_loader_loads_what_the_controller_counted_on(slow):
    """The long chunk takes longer than its share of computing would; together they do not."""
    made, _ = slow
    let_loading_take(made, UNEVEN, 0.9)
    lookups = recorded(made, ChunkLookup)
    made.answer(UNEVEN, "cacheblend-auto")
    wait_for(lookups, 3)
    assert [lookup.tier for lookup in lookups] == ["slow"] * 3


def test_without_a_forecast_each_chunk_is_decided_alone(slow):
    made, _ = slow
    let_loading_take(made, UNEVEN, 0.9)
    lookups = recorded(made, ChunkLookup)
    made.answer(UNEVEN, "cacheblend-50")
    wait_for(lookups, 3)
    assert sorted(lookup.tier for lookup in lookups) == ["none", "slow", "slow"]


def test_unions_settle_part_by_part(slow):
    made, _ = slow
    let_loading_take(made, PROMPT, 0.5)
    explanation = made.explain(PROMPT, "cacheblend-auto-onestep+legolink-2")
    blend, lego = explanation.settled.split("+")
    assert blend.startswith("cacheblend-")
    assert blend.endswith("-onestep")
    assert 40 < float(blend.split("-")[1]) < 60
    assert lego == "legolink-2"


def wait_for_host(made, prompt):
    wait_until(lambda: all(made.store.tier_of(key) == "host" for key in keys_of(made, prompt)))
