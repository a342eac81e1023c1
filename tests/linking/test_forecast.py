"""The loading controller's arithmetic (CacheBlend, section 5.1), and the policy that goes by it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.linking import Evidence, Forecast, make_plan, parse_policy
from kvlinker.linking.policies.cacheblend import CacheBlend, CacheBlendAuto
from tests.linking.test_policies import chunk_prompt

seconds = st.floats(1e-6, 1e6)
percents = st.floats(0, 100)


@given(seconds, seconds, percents)
def test_recomputing_takes_as_long_as_loading_between_the_bounds(load, prefill, least):
    percent = Forecast(load, prefill).hidden_percent(least)
    assert least <= percent <= 100
    if least < percent < 100:
        assert percent / 100 * prefill == pytest.approx(
            load
        )  # T_recompute(r, L) = r · T_prefill(L) = T_load(L)
    elif percent == least:
        assert least / 100 * prefill >= load * (1 - 1e-9)
    else:
        assert load >= prefill * (1 - 1e-9)


@given(seconds, seconds, seconds, percents)
def test_slower_loading_hides_more(one, other, prefill, least):
    low, high = sorted([one, other])
    assert Forecast(low, prefill).hidden_percent(least) <= Forecast(high, prefill).hidden_percent(
        least
    )
    assert Forecast(prefill, low).hidden_percent(least) >= Forecast(prefill, high).hidden_percent(
        least
    )


def test_the_papers_example():
    """Llama-7B, 4k tokens: 15% take 3 ms per layer, loading 16 ms; Llama-70B: 7 ms, and 4 ms."""
    assert Forecast(0.016, 0.003 / 0.15).hidden_percent(15) == pytest.approx(80)
    assert Forecast(0.004, 0.007 / 0.15).hidden_percent(15) == 15


@pytest.mark.parametrize(
    "forecast", [Forecast(None, 1.0), Forecast(1.0, None), Forecast(None, None), Forecast(1, 0.0)]
)
def test_what_is_not_measured_hides_nothing(forecast):
    assert forecast.hidden_percent(15) == 15
    assert not forecast.worth_loading


def test_loading_is_worth_it_while_computing_takes_longer():
    assert Forecast(1.0, 1.0).worth_loading
    assert Forecast(0.0, 1.0).worth_loading
    assert not Forecast(1.1, 1.0).worth_loading


@given(seconds, seconds, percents)
def test_what_does_not_overlap_hides_nothing(load, prefill, least):
    percent = Forecast(load, prefill, overlaps=False).hidden_percent(least)
    assert percent in (least, 100)
    if percent < 100:
        assert load + least / 100 * prefill <= prefill * (1 + 1e-9)
    else:
        assert load + least / 100 * prefill >= prefill * (1 - 1e-9)


@given(seconds, seconds, percents)
def test_auto_settles_on_what_is_hidden(load, prefill, least):
    made: Any = CacheBlendAuto  # mypy does not see the defaults of its other parameters
    policy = made(least)
    settled = policy.settle(Forecast(load, prefill))
    if load >= prefill and policy.percent < 100:
        assert settled.name == "full"
    else:
        assert isinstance(settled, CacheBlend)
        assert settled.family == "cacheblend"
        assert policy.percent <= settled.percent <= 100
        assert settled.percent == pytest.approx(
            Forecast(load, prefill).hidden_percent(least), abs=0.051
        )


@pytest.mark.parametrize(
    ("policy", "settled"),
    [
        ("cacheblend-auto", "cacheblend-40"),
        ("cacheblend-auto-20-onestep", "cacheblend-40-onestep"),
        ("cacheblend-auto-60-v-d50", "cacheblend-60-v-d50"),
        ("cacheblend-auto+legolink-4", "cacheblend-40+legolink-4"),
        ("cacheblend-auto+cacheblend-40", "cacheblend-40"),
        ("cacheblend-15", "cacheblend-15"),
        ("query-5", "query-5"),
    ],
)
def test_parameters_and_other_policies_stay_as_they_are(policy, settled):
    assert parse_policy(policy).settle(Forecast(0.4, 1.0)).name == settled


def test_unions_ask_for_a_forecast_if_a_part_does():
    assert parse_policy("query-5+cacheblend-auto").needs.forecast
    assert not parse_policy("query-5+cacheblend-15").needs.forecast


def test_auto_alone_is_its_least_ratio():
    policy, plain = parse_policy("cacheblend-auto-30"), parse_policy("cacheblend-30")
    assert isinstance(policy, CacheBlendAuto)
    assert isinstance(plain, CacheBlend)
    prompt = chunk_prompt(20, 30)
    assert policy.needs.refines
    assert policy.kept_percent(1, 24) == plain.kept_percent(1, 24)
    assert (policy.select(prompt, Evidence()) == prompt.inexact).all()


@pytest.mark.parametrize("policy", ["cacheblend-100", "cacheblend-100-onestep-d100"])
def test_where_everything_is_computed_nothing_is_placed(policy):
    prompt = chunk_prompt(5, 6, header=2)
    plan = make_plan(prompt, parse_policy(policy), Evidence())
    assert plan.placements == ()
    assert plan.runs == ((0, len(prompt)),)
