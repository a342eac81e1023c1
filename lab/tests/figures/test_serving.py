"""What figures under load say of rows that are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from kvlinker.quality.bench.harness.report import Row
from kvlinker_lab.figures.figure import find_figure
from kvlinker_lab.figures.serving import describe_ratios, ratios

RATES = (0.5, 1.0, 2.0)


def rows_of(ttft: Mapping[str, tuple[float | None, ...]], requests_per_s: float = 1.0) -> list[Row]:
    """A row per policy and rate, with these median times to the first token in milliseconds."""

    def made() -> Iterator[Row]:
        for policy, times in ttft.items():
            for rate, time in zip(RATES, times, strict=True):
                latency = None if time is None else 2 * time
                yield {
                    "policy": policy,
                    "relative_rate": rate,
                    "ttft_p50_ms": time,
                    "latency_p50_ms": latency,
                    "tokens_per_s": 32 * requests_per_s,
                    "requests_per_s": requests_per_s,
                    "requests": 8,
                    "failed": int(time is None),
                }

    return list(made())


def test_ratios_are_told_where_both_were_measured() -> None:
    rows = rows_of({"full": (100, 300, None), "naive": (50, 100, 100)})
    found = ratios(rows, "full", "naive", "relative_rate", "ttft_p50_ms")
    assert found == {0.5: 2.0, 1.0: 3.0}
    assert describe_ratios(found) == "2.0× at 0.5, 3.0× at 1"
    assert (
        describe_ratios(ratios(rows, "full", "none", "relative_rate", "ttft_p50_ms"))
        == "nowhere comparable"
    )


def test_a_rate_is_sustained_while_first_tokens_come_soon_enough() -> None:
    rows = rows_of({"full": (100, 250, 900), "cacheblend-15": (30, 60, 180)})
    said = find_figure("cacheblend-14").finding(rows)
    assert "full 100 ms, cacheblend-15 30 ms" in said
    assert "below 2 times full's there: full 0.5, cacheblend-15 2;" in said
    assert "plain, reordered) is not measured" in said
    with_both = find_figure("cacheblend-14").finding(
        [*rows, *rows_of({"plain": (90, 150, 300), "reordered": (80, None, 9)})]
    )
    assert "plain 1, reordered 0.5" in with_both
    assert "not measured" not in with_both


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        (("full", "cachecraft-0.6", "naive"), "beside full, for the engine has no prefix cache"),
        (("full", "plain", "cachecraft-0.6", "naive"), "beside prefix caching (plain)"),
    ],
)
def test_the_baseline_is_prefix_caching_where_there_is_some(
    policies: tuple[str, ...], said: str
) -> None:
    told = find_figure("cachecraft-22").finding(rows_of(dict.fromkeys(policies, (100, 100, 100))))
    assert said in told


def test_failures_are_told() -> None:
    rows = rows_of(
        {"attnlink-16": (10, 20, 30), "legolink-16": (10, 20, 30), "cacheblend-15": (40, 100, None)}
    )
    said = find_figure("epic-7").finding(rows)
    assert "sooner by 4.0× at 0.5, 5.0× at 1;" in said
    assert "Of 72 requests 1 failed" in said
