"""Measures EPIC's figure 8: time to first token against context length, chunks being of one
size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import Any

from kvlinker.quality.bench.harness.measurement import Workload
from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.bench.ttft import run_ttft, scaling_exponents
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.lab import Lab

SHAPE = "285m"
POLICIES = ("full", "cacheblend-15", "attnlink-16", "legolink-16", "naive")
EPIC, CACHEBLEND = "attnlink-16", "cacheblend-15"
CHUNKS = (1, 2, 4, 8, 16)
CHUNK_TOKENS = 512
"""The tokens of a chunk: the default of the benchmarks."""

FRESH_TOKENS = 32
"""The tokens behind the chunks: the default of the benchmarks."""

FULL_CHUNKS = 8
"""``full`` is left out of longer prompts: a minute each."""
REPEAT = 3
"""The measurements of each length, of which the median counts."""


def _measure(lab: Lab) -> list[Row]:
    """Time all lengths; a lab's limit is the most chunks of a prompt."""
    chunks = [number for number in CHUNKS if lab.limit is None or number <= lab.limit]
    steps, total = (
        count(),
        sum(1 + (REPEAT + 1) * (len(POLICIES) - (number > FULL_CHUNKS)) for number in chunks),
    )

    def report_progress(what: str, _done: int = 0, _total: int | None = None, /) -> None:
        lab.progress(what, next(steps), total)

    report = run_ttft(
        lab.random_model(SHAPE),
        [Workload(number, CHUNK_TOKENS, FRESH_TOKENS) for number in chunks],
        POLICIES,
        repeat=REPEAT,
        full_limit=Workload(FULL_CHUNKS, CHUNK_TOKENS, FRESH_TOKENS).tokens,
        with_transformers=False,
        progress=report_progress,
    )
    return list(report.rows)


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    exponents = _exponents(rows)
    for policy in POLICIES:
        points = [
            (row["context_tokens"], row["ttft_ms"]) for row in rows if row["policy"] == policy
        ]
        label = f"{policy} ($N^{{{exponents[policy]:.2f}}}$)" if policy in exponents else policy
        axes.plot(*zip(*points, strict=True), marker="o", markersize=5, label=label)
    lengths = sorted({row["context_tokens"] for row in rows})
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="prompt length N (tokens)",
        ylabel="time to first token (ms)",
    )
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()


def _finding(rows: Sequence[Row]) -> str:
    common = _common(rows)
    lengths = sorted({row["context_tokens"] for row in common})
    longest = max(row["context_tokens"] for row in rows)
    exponents = _exponents(rows)
    grown = ", ".join(f"{policy} {exponent:.2f}" for policy, exponent in exponents.items())
    said = [
        (
            f"from {lengths[0]} to {lengths[-1]} tokens, TTFT grows with the length to the power"
            f" of: {grown} (1 is linear, 2 quadratic; one chunk alone is left out, since it needs"
            " no repair)."
            if exponents
            else "there are too few lengths for a law of growth."
        ),
        _at(rows, lengths[-1]),
    ]
    if longest > lengths[-1]:
        growth = ", ".join(
            f"{policy} {_power(rows, policy, lengths[-1], longest):.2f}"
            for policy in POLICIES
            if policy != "full"
        )
        said += [f"From there to {longest} tokens the powers are: {growth}.", _at(rows, longest)]
    return " ".join(said)


def _at(rows: Sequence[Row], length: int) -> str:
    """Say what the policies take at a length, in seconds."""
    of = {row["policy"]: row["ttft_ms"] / 1e3 for row in rows if row["context_tokens"] == length}
    ratio = of[CACHEBLEND] / of[EPIC]
    times = ", ".join(f"{policy} {seconds:.2g} s" for policy, seconds in of.items())
    return f"At {length} tokens: {times}; {CACHEBLEND} takes {ratio:.1f} times as long as {EPIC}."


def _power(rows: Sequence[Row], policy: str, shorter: int, longer: int) -> float:
    """Return the b of ttft = a · tokens^b through two lengths."""
    of = {row["context_tokens"]: row["ttft_ms"] for row in rows if row["policy"] == policy}
    return math.log(of[longer] / of[shorter]) / math.log(longer / shorter)


def _common(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of prompts that ``full`` was measured on; those of one chunk only if there
    are no others."""
    lengths = {row["context_tokens"] for row in rows if row["policy"] == "full"}
    common = [row for row in rows if row["context_tokens"] in lengths]
    return [row for row in common if row["chunks"] > 1] or common


def _exponents(rows: Sequence[Row]) -> dict[str, float]:
    """Return exponents by policy, over the lengths that all were measured on; none where these are
    fewer than three."""
    return {policy: exponent for (policy, _), exponent in scaling_exponents(_common(rows)).items()}


def _table(rows: Sequence[Row]) -> list[Row]:
    """Make a row per length, with the milliseconds of each policy."""
    return [
        {"tokens": length}
        | dict.fromkeys(POLICIES)
        | {row["policy"]: row["ttft_ms"] for row in rows if row["context_tokens"] == length}
        for length in sorted({row["context_tokens"] for row in rows})
    ]


FIGURE = Figure(
    name="epic-8",
    title="Time to first token against context length",
    source="EPIC, figure 8",
    claim=(
        "with chunks of 1024 tokens, the time to first token of full recomputation and of"
        " CacheBlend-15 grows quadratically with the context, that of AttnLink-16 almost linearly."
    ),
    columns=("tokens", *POLICIES),
    measure=_measure,
    draw=_draw,
    finding=_finding,
    table=_table,
    shape=SHAPE,
)
register(FIGURE)
