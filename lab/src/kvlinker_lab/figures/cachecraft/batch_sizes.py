"""Measures Cache-Craft's figure 23 (d): time to first token of batches of requests that come at
once."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from kvlinker.quality.bench.harness.report import Row
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.lab import Lab
from kvlinker_lab.figures.serving import SHAPE, describe_ratios, ratios, serve_shape
from kvlinker_lab.load.prompts import PLAIN
from kvlinker_lab.load.report import draw_over_load
from kvlinker_lab.load.traffic import TrafficShape

FULL, H2O = "full", "h2o-60"
CACHECRAFT = "cachecraft-0.5"
"""Recomputes 25%, as in the paper: chunks that were computed alone have a CCI of one half."""
POLICIES = (FULL, PLAIN, H2O, CACHECRAFT)
TRAFFIC = TrafficShape(
    library=24, chunks=4, chunk_tokens=512, fresh_tokens=32, output_tokens=(2, 2)
)
BATCHES = (1, 2, 4, 8)
REPEAT = 3
"""The batches of each size, of which the median counts."""


def _measure(lab: Lab) -> list[Row]:
    """Measure all batches, each several times with other prompts; a lab's limit is the largest
    batch."""
    batches = [batch for batch in BATCHES if lab.limit is None or batch <= lab.limit]
    taken: dict[tuple[str, int], list[Row]] = defaultdict(list)
    with serve_shape(lab, TRAFFIC) as load:
        for turn in range(REPEAT):
            for row in load.at_once(POLICIES, batches, seed=100 * turn):
                taken[row["policy"], row["users"]].append(row)
    return [
        {
            "policy": policy,
            "engine": rows[0]["engine"],
            "batch": batch,
            "ttft_ms": _median([row["ttft_p50_ms"] for row in rows]),
            "slowest_ms": _median([row["ttft_p99_ms"] for row in rows]),
            "recomputed_fraction": rows[0]["recomputed_fraction"],
            "failed": sum(row["failed"] for row in rows),
        }
        for (policy, batch), rows in taken.items()
    ]


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    draw_over_load(axes, rows, "batch", "ttft_ms")
    axes.set(
        xlabel="batch size", ylabel="time to first token (ms), median of the batch", yscale="log"
    )
    axes.legend()


def _finding(rows: Sequence[Row]) -> str:
    def sooner(than: str) -> str:
        return describe_ratios(ratios(rows, than, CACHECRAFT, "batch", "ttft_ms"))

    without = (
        ""
        if any(row["policy"] == PLAIN for row in rows)
        else " Prefix caching is not measured: the engine has no prefix cache."
    )
    return (
        f"by batch size, {CACHECRAFT}'s first token comes sooner than full's by {sooner(FULL)}, and"
        f" by {sooner(H2O)} sooner than that of {H2O}, which the paper measures at the same"
        f" quality.{without} Prompts have {TRAFFIC.chunks * TRAFFIC.chunk_tokens} tokens of chunks;"
        f" medians of {REPEAT} batches."
    )


register(
    Figure(
        name="cachecraft-23",
        title="Time to first token against the batch size",
        source="Cache-Craft, figure 23 (d)",
        claim=(
            "with prompts of 8192 tokens, the time to first token grows less with the batch size"
            " for Cache-Craft (25% recomputed) than for all others of the same quality: full"
            " recomputation, prefix caching of which 60% hit, prompt compression, and H2O's choice"
            " of 60% of the tokens."
        ),
        columns=("policy", "batch", "ttft_ms", "slowest_ms", "recomputed_fraction", "failed"),
        measure=_measure,
        draw=_draw,
        finding=_finding,
        shape=SHAPE,
    )
)
