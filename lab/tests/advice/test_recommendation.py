"""What is recommended for given figures and prices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker_lab.advice.recommendation import TierFigures, explain_recommendation, recommend


def figures(
    tier="disk",
    *,
    rate=1e9,
    overlaps=True,
    percent=15.0,
    prefill=1.0,
    bytes_per_token=1000.0,
    price=1.0,
):
    return TierFigures(
        tier,
        codec="raw",
        bytes_per_token=bytes_per_token,
        bytes_per_second=rate,
        busy_percent=50 if not overlaps else 0,
        overlaps=overlaps,
        load_seconds=1000 * bytes_per_token / rate,
        prefill_seconds=prefill,
        percent=percent,
        price_per_gb=price,
    )


def test_the_papers_formulas():
    tier = figures(rate=2e6, percent=15, prefill=4.0, price=0.1)
    assert tier.load_seconds == pytest.approx(0.5)  # PerTokenKVSize · L / Throughput
    assert tier.recompute_seconds == pytest.approx(0.6)  # r · Prefill(L)
    assert tier.hidden
    assert tier.hidden_percent == pytest.approx(12.5)
    assert tier.price_per_million_tokens == pytest.approx(0.1)
    assert not figures(rate=1e6, percent=15, prefill=4.0).hidden


positive = st.floats(1e-3, 1e3)


@st.composite
def any_tiers(draw):
    return [
        figures(
            f"tier{index}",
            rate=1e6 * draw(positive),
            bytes_per_token=draw(positive),
            price=draw(positive),
        )
        for index in range(draw(st.integers(0, 5)))
    ]


@given(any_tiers())
def test_the_cheapest_of_those_that_hide_is_recommended(tiers):
    chosen = recommend(tiers)
    hidden = [tier for tier in tiers if tier.load_seconds <= tier.recompute_seconds]
    if chosen is None:
        assert not hidden
    else:
        assert chosen in hidden
        assert all(
            chosen.price_per_million_tokens <= tier.price_per_million_tokens for tier in hidden
        )


@given(positive, positive, positive)
def test_a_tier_hides_from_its_hidden_percent_on(rate, per_token, prefill):
    tier = figures(rate=1e6 * rate, bytes_per_token=per_token, prefill=prefill)
    if tier.hidden_percent < 99:
        assert figures(
            rate=1e6 * rate,
            bytes_per_token=per_token,
            prefill=prefill,
            percent=tier.hidden_percent * 1.01,
        ).hidden
    if tier.hidden_percent < 100:
        below = tier.hidden_percent * 0.99
        assert not figures(
            rate=1e6 * rate, bytes_per_token=per_token, prefill=prefill, percent=below
        ).hidden


def test_bytes_count_not_only_the_price_of_a_gigabyte():
    small, cheap = figures("small", bytes_per_token=300, price=2.0), figures("cheap", price=1.0)
    assert recommend([cheap, small]) == small


def test_of_two_at_one_price_the_faster_is_recommended():
    slow, fast = figures("slow", rate=1e9), figures("fast", rate=2e9)
    assert recommend([slow, fast]) == fast


def test_the_way_out_is_more_computation():
    tier = figures(rate=4e6)
    assert tier.load_seconds == pytest.approx(0.25)
    assert not tier.hidden
    told = explain_recommendation([tier])
    assert told == [
        "No tier's loading is hidden. What there is:",
        "- recomputing 25% or more, such as cacheblend-25, with the disk tier",
    ]


def test_no_way_out_where_computing_is_quicker_than_loading():
    _, way = explain_recommendation([figures(rate=1e5)])
    assert "computing everything" in way


@pytest.mark.parametrize("rate", [1e9, 1e5], ids=["quicker than computing", "slower"])
def test_no_percent_hides_loading_that_overlaps_with_nothing(rate):
    assert figures(rate=rate, overlaps=False).hidden_percent == 0


def test_reading_on_the_models_processors_hides_nothing():
    tier = figures(rate=1e9, overlaps=False)
    assert not tier.hidden
    _, way = explain_recommendation([tier])
    assert "adds 1 ms" in way
    assert "50%" in way
    assert figures(rate=1e9).hidden


def test_what_a_tier_adds_is_what_is_not_hidden():
    assert figures(rate=4e6, percent=15).added_seconds == pytest.approx(0.25 - 0.15)
    assert figures(rate=4e6, percent=30).added_seconds == 0
    assert figures(rate=4e6, percent=30, overlaps=False).added_seconds == pytest.approx(0.25)


def test_cheaper_tiers_are_told_with_what_they_add():
    host = figures("host", rate=1e9, price=3)
    disk = figures("disk", rate=1e7, price=0.1, overlaps=False)
    tape = figures("tape", rate=2e6, price=0.01)
    assert recommend([host, disk, tape]) == host
    first, slow, busy = explain_recommendation([host, disk, tape])
    assert first.startswith(
        "Recommended: host, the cheapest tier whose loading is hidden: 1 ms during 150 ms"
    )
    assert slow == "- tape is cheaper, and adds 350 ms"
    assert busy.startswith(
        "- disk is cheaper, and adds 100 ms (reading keeps a processor busy for 50%"
    )
