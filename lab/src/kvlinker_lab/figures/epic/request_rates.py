"""Measures EPIC's figure 7: time to first token and throughput against the rate of requests (its
RQ2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlinker.quality.bench.harness.report import Row
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.lab import Lab
from kvlinker_lab.figures.serving import SHAPE, describe_ratios, ratios, serve_shape
from kvlinker_lab.load.report import draw_over_load
from kvlinker_lab.load.traffic import TrafficShape

ATTNLINK, LEGOLINK, CACHEBLEND = "attnlink-16", "legolink-16", "cacheblend-15"
POLICIES = (ATTNLINK, LEGOLINK, CACHEBLEND)
TRAFFIC = TrafficShape(
    library=24, chunks=4, chunk_tokens=512, fresh_tokens=32, output_tokens=(32, 32)
)
RATES = (1.0, 2.0, 4.0, 8.0)
REQUESTS = 24
"""The requests at each rate, unless ``--limit`` gives another number."""


def _measure(lab: Lab) -> list[Row]:
    """Measure all rates; a lab's limit is the number of requests at each."""
    with serve_shape(lab, TRAFFIC) as load:
        return load.at_rates(POLICIES, RATES, requests=lab.limit or REQUESTS)


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    first_token, throughput = canvas.subplots(1, 2)
    draw_over_load(first_token, rows, "relative_rate", "ttft_p50_ms")
    draw_over_load(throughput, rows, "relative_rate", "tokens_per_s")
    first_token.set(ylabel="time to first token (ms), median", yscale="log")
    throughput.set(ylabel="output tokens per second")
    for axes in (first_token, throughput):
        axes.set(xlabel="request rate (full, one at a time: 1)")
    canvas.legend(*first_token.get_legend_handles_labels(), loc="outside lower center", ncols=3)


def _finding(rows: Sequence[Row]) -> str:
    def beside(policy: str) -> str:
        sooner = ratios(rows, CACHEBLEND, policy, "relative_rate", "ttft_p50_ms")
        more = ratios(rows, policy, CACHEBLEND, "relative_rate", "tokens_per_s")
        return (
            f"{policy}'s first token comes sooner by {describe_ratios(sooner)}; its throughput is"
            f" {describe_ratios(more)}"
        )

    failed = sum(row["failed"] for row in rows)
    return (
        f"beside {CACHEBLEND}, by request rate: {beside(ATTNLINK)}. {beside(LEGOLINK)}. Of"
        f" {sum(row['requests'] for row in rows)} requests {failed} failed. Times count from a"
        " request's arrival, so waiting is in them, where the paper leaves it out; throughput"
        " below saturation is the rate itself. Context caches are not in the memory of running"
        " requests here, so their share of it is not varied."
    )


register(
    Figure(
        name="epic-7",
        title="Time to first token and throughput against the request rate",
        source="EPIC, figure 7",
        claim=(
            "with requests that arrive as a Poisson process and all context caches made before, the"
            " first token comes up to 8 times sooner with AttnLink-16 than with CacheBlend-15, and"
            " throughput is up to 7 times higher."
        ),
        columns=(
            "policy",
            "relative_rate",
            "rate",
            "ttft_p50_ms",
            "ttft_p99_ms",
            "tokens_per_s",
            "requests_per_s",
            "failed",
            "recomputed_fraction",
        ),
        measure=_measure,
        draw=_draw,
        finding=_finding,
        size=(9.0, 4.5),
        shape=SHAPE,
    )
)
