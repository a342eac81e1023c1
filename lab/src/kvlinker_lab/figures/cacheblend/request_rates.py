"""Measures CacheBlend's figure 14: time to first token against the rate of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlinker.quality.bench.harness.report import Row
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.lab import Lab
from kvlinker_lab.figures.serving import SHAPE, serve_shape, value_at
from kvlinker_lab.load.prompts import PLAIN, REORDERED
from kvlinker_lab.load.report import draw_over_load
from kvlinker_lab.load.traffic import TrafficShape

FULL, CACHEBLEND = "full", "cacheblend-15"
POLICIES = (FULL, PLAIN, REORDERED, CACHEBLEND)
TRAFFIC = TrafficShape(
    library=24, chunks=6, chunk_tokens=512, fresh_tokens=32, output_tokens=(8, 8)
)
"""Six chunks of 512 tokens in random order and short answers, as in the paper."""
RATES = (0.25, 0.5, 1.0, 2.0, 4.0)
REQUESTS = 24
"""The requests at each rate, unless ``--limit`` gives another number."""

TIMES_IDLE = 2
"""How many times ``full``'s time to first token at the lowest rate a rate may take, to count as
sustained."""


def _measure(lab: Lab) -> list[Row]:
    """Measure all rates; a lab's limit is the number of requests at each."""
    with serve_shape(lab, TRAFFIC) as load:
        return load.at_rates(POLICIES, RATES, requests=lab.limit or REQUESTS)


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    draw_over_load(axes, rows, "relative_rate", "ttft_p50_ms")
    draw_over_load(axes, rows, "relative_rate", "ttft_p99_ms", linestyle=":", alpha=0.6)
    axes.set(
        xlabel="request rate (full, one at a time: 1)",
        ylabel="time to first token (ms)",
        yscale="log",
        title="median; 99th percentile dotted",
    )
    axes.legend()


def _finding(rows: Sequence[Row]) -> str:
    rates = sorted({row["relative_rate"] for row in rows})
    lowest = rates[0]
    idle = value_at(rows, FULL, "relative_rate", lowest, "ttft_p50_ms")
    assert idle is not None, "full has no answers at the lowest rate"
    limit = TIMES_IDLE * idle
    measured = dict.fromkeys(row["policy"] for row in rows)
    sustained = {policy: _sustained_rate(rows, policy, limit) for policy in measured}
    at_lowest = ", ".join(
        f"{policy} {ttft:.0f} ms"
        for policy in measured
        if (ttft := value_at(rows, policy, "relative_rate", lowest, "ttft_p50_ms")) is not None
    )
    shown = ", ".join(f"{policy} {rate:g}" for policy, rate in sustained.items())
    missing = [policy for policy in (PLAIN, REORDERED) if policy not in measured]
    without = (
        f" Prefix caching ({', '.join(missing)}) is not measured: the engine has no prefix cache."
        if missing
        else ""
    )
    return (
        f"at the lowest rate, {lowest:g}, the median time to first token is {at_lowest}. The"
        f" highest rate at which it stays below {TIMES_IDLE} times full's there: {shown}; rates"
        f" were {', '.join(f'{rate:g}' for rate in rates)}.{without}"
    )


def _sustained_rate(rows: Sequence[Row], policy: str, limit_ms: float) -> float:
    """Return the highest relative rate up to which the median time to first token is within the
    limit; 0 for none."""
    highest = 0.0
    for row in sorted(
        (row for row in rows if row["policy"] == policy), key=lambda row: row["relative_rate"]
    ):
        if row["ttft_p50_ms"] is None or row["ttft_p50_ms"] > limit_ms:
            break
        highest = row["relative_rate"]
    return highest


register(
    Figure(
        name="cacheblend-14",
        title="Time to first token against the request rate",
        source="CacheBlend, figure 14",
        claim=(
            "with 6 chunks of 512 tokens per request, CacheBlend has a lower delay at a 2.8 to 5"
            " times higher throughput than the baselines of its quality: at the same time to first"
            " token up to 5 times that of full recomputation, and 3.3 times that of prefix caching."
        ),
        columns=(
            "policy",
            "relative_rate",
            "rate",
            "ttft_p50_ms",
            "ttft_p99_ms",
            "requests_per_s",
            "failed",
        ),
        measure=_measure,
        draw=_draw,
        finding=_finding,
        shape=SHAPE,
    )
)
