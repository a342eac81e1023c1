"""Rows of results that are known, and their plot."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlinker.quality.bench.harness.report import Row
from kvlinker_lab.load.driver import (
    ClosedLoop,
    LoadRun,
    OpenLoop,
    PromptUsage,
    RequestResult,
)
from kvlinker_lab.load.report import ServiceObjective, load_row, plot_load, with_ratios

OBJECTIVE = ServiceObjective(ttft_seconds=1.0, tpot_seconds=0.1)


def answered(
    first: float, per_token: float = 0.05, usage: PromptUsage | None = None
) -> RequestResult:
    last = first + 4 * per_token
    return RequestResult(first, last, last + 0.01, output_tokens=5, usage=usage)


def failed(kind: str) -> RequestResult:
    return RequestResult(None, None, 3.0, failure=kind)


def row_of(
    *results: RequestResult, seconds: float = 10.0, load: OpenLoop | ClosedLoop | None = None
) -> Row:
    return load_row(
        "naive",
        "embedded",
        load or ClosedLoop(4),
        LoadRun(results, seconds),
        OBJECTIVE,
        memory_mb=12.5,
    )


def test_rows_have_what_was_measured() -> None:
    usage = PromptUsage(100, cached_tokens=60, recomputed_tokens=20)
    row = row_of(
        *(answered(first, usage=usage) for first in (0.4, 0.1, 0.3, 0.2)),
        answered(2.0, usage=usage),  # too late
        answered(0.5, 0.2, usage=usage),  # too slow
    )
    assert row["ttft_p50_ms"] == pytest.approx(300)
    assert row["ttft_p99_ms"] == pytest.approx(2000)
    assert row["tpot_p50_ms"] == pytest.approx(50)
    assert row["tpot_p99_ms"] == pytest.approx(200)
    assert row["latency_p50_ms"] == pytest.approx(510)
    assert row["requests_per_s"] == pytest.approx(0.6)
    assert row["goodput_per_s"] == pytest.approx(0.4)
    assert row["tokens_per_s"] == pytest.approx(3.0)
    assert (row["failed"], row["failures"]) == (0, {})
    assert row["recomputed_fraction"] == pytest.approx(0.25)
    assert row["cached_fraction"] == pytest.approx(0.6)
    assert (row["rate"], row["users"], row["memory_mb"]) == (None, 4, 12.5)


def test_requests_that_fail_are_not_left_out() -> None:
    row = row_of(
        answered(0.1),
        answered(0.2),
        failed("unfinished"),
        failed("status 429"),
        failed("unfinished"),
    )
    assert row["requests"] == 5
    assert row["failures"] == {"status 429": 1, "unfinished": 2}
    assert row["failed"] == 3
    assert row["requests_per_s"] == pytest.approx(0.2)
    assert row["ttft_p50_ms"] is None  # three of five never had an answer
    assert row_of(answered(0.1), answered(0.2), failed("connection"))[
        "ttft_p50_ms"
    ] == pytest.approx(200)


def test_what_a_server_does_not_tell() -> None:
    row = row_of(answered(0.1, usage=PromptUsage(100, None, None)), load=OpenLoop(0.5))
    assert (row["recomputed_fraction"], row["cached_fraction"], row["prompt_tokens"]) == (
        None,
        None,
        100,
    )
    assert (row["rate"], row["users"]) == (0.5, None)
    assert row_of(answered(0.1, usage=PromptUsage(100, 50, None)))[
        "cached_fraction"
    ] == pytest.approx(0.5)
    single = RequestResult(0.1, 0.1, 0.1, output_tokens=1)
    assert row_of(single)["tpot_p50_ms"] is None
    assert row_of(single)["goodput_per_s"] == pytest.approx(0.1)


def test_throughput_is_set_beside_full_of_the_same_load() -> None:
    def row(policy: str, users: int, requests: float) -> Row:
        return {
            "policy": policy,
            "engine": "e",
            "rate": None,
            "users": users,
            "requests_per_s": requests,
        }

    rows = with_ratios(
        [row("full", 1, 2.0), row("naive", 1, 6.0), row("naive", 4, 6.0), row("full", 2, 0.0)]
    )
    assert [one["ratio_to_full"] for one in rows] == [1.0, 3.0, None, None]


def test_plots_have_a_panel_for_each_kind_of_load(tmp_path: Path) -> None:
    rows = [row_of(answered(0.1 * rate), load=OpenLoop(rate)) for rate in (1.0, 2.0)]
    plot_load(
        [*rows, row_of(failed("unfinished"), load=OpenLoop(3.0)), row_of(answered(0.2))],
        tmp_path / "load.svg",
    )
    drawn = (tmp_path / "load.svg").read_text()
    assert "requests per second" in drawn
    assert "users" in drawn
    plot_load(rows, tmp_path / "rates.svg")
    assert "users" not in (tmp_path / "rates.svg").read_text()
