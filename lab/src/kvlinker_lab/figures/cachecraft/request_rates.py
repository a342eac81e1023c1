"""Measures Cache-Craft's figure 22: throughput and response latency under low, medium and high
load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlinker.quality.bench.harness.report import Row
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.lab import Lab
from kvlinker_lab.figures.serving import SHAPE, describe_ratios, ratios, serve_shape
from kvlinker_lab.load.prompts import PLAIN
from kvlinker_lab.load.report import draw_over_load
from kvlinker_lab.load.traffic import TrafficShape

FULL, NAIVE = "full", "naive"
CACHECRAFT = "cachecraft-0.6"
"""Recomputes 30%: chunks that were computed alone have a CCI of one half."""
POLICIES = (FULL, PLAIN, CACHECRAFT, NAIVE)
TRAFFIC = TrafficShape(
    library=24, chunks=5, chunk_tokens=512, fresh_tokens=32, output_tokens=(16, 64)
)
"""The top 5 chunks of a retriever, as in the paper's production workload."""
LOADS = (0.5, 1.0, 2.0)
REQUESTS = 24
"""The requests at each load, unless ``--limit`` gives another number."""


def _measure(lab: Lab) -> list[Row]:
    """Measure all loads; a lab's limit is the number of requests at each."""
    with serve_shape(lab, TRAFFIC) as load:
        return load.at_rates(POLICIES, LOADS, requests=lab.limit or REQUESTS)


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    throughput, latency = canvas.subplots(1, 2)
    draw_over_load(throughput, rows, "relative_rate", "requests_per_s")
    draw_over_load(latency, rows, "relative_rate", "latency_p50_ms")
    throughput.set(ylabel="answers per second")
    latency.set(ylabel="time to the whole answer (ms), median", yscale="log")
    for axes in (throughput, latency):
        axes.set(xlabel="request rate (full, one at a time: 1)")
    canvas.legend(*throughput.get_legend_handles_labels(), loc="outside lower center", ncols=4)


def _finding(rows: Sequence[Row]) -> str:
    baseline = PLAIN if any(row["policy"] == PLAIN for row in rows) else FULL

    def beside(policy: str) -> str:
        more = ratios(rows, policy, baseline, "relative_rate", "requests_per_s")
        sooner = ratios(rows, baseline, policy, "relative_rate", "latency_p50_ms")
        return (
            f"{policy}'s throughput is {describe_ratios(more)}, its response latency lower by"
            f" {describe_ratios(sooner)}"
        )

    named = (
        "prefix caching (plain)"
        if baseline == PLAIN
        else "full, for the engine has no prefix cache"
    )
    return f"beside {named}, by load: {beside(CACHECRAFT)}; {beside(NAIVE)}."


register(
    Figure(
        name="cachecraft-22",
        title="Throughput and response latency under load",
        source="Cache-Craft, figure 22",
        claim=(
            "with continuous batching under high load (240 requests a minute for LLaMA-3-8B),"
            " throughput is up to 1.9 times that of prefix caching and response latency 3.3 times"
            " lower with nothing recomputed, and 1.6 and 2.1 times with 30% recomputed."
        ),
        columns=(
            "policy",
            "relative_rate",
            "rate",
            "requests_per_s",
            "latency_p50_ms",
            "latency_p99_ms",
            "ttft_p50_ms",
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
