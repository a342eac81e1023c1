"""EPIC, figure 8: time to first token against context length, chunks being of one size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from kvlinker.bench.report import Row
from kvlinker.bench.ttft import Workload, run_ttft, scaling_exponents
from kvlinker.figures.figure import Figure
from kvlinker.figures.lab import Lab

SHAPE = "285m"
POLICIES = ("full", "cacheblend-15", "attnlink-16", "legolink-16", "naive")
CHUNKS = (1, 2, 4, 8, 16)
CHUNK_TOKENS = 512
FRESH_TOKENS = 32
FULL_CHUNKS = 8
"""``full`` is left out of longer prompts: a minute each."""
REPEAT = 3


def _measure(lab: Lab) -> list[Row]:
    """A lab's limit is the most chunks of a prompt."""
    chunks = [number for number in CHUNKS if lab.limit is None or number <= lab.limit]
    steps, total = count(), sum(1 + (REPEAT + 1) * (len(POLICIES) - (number > FULL_CHUNKS)) for number in chunks)
    report = run_ttft(
        lab.timed(SHAPE),
        [Workload(number, CHUNK_TOKENS, FRESH_TOKENS) for number in chunks],
        POLICIES,
        repeat=REPEAT,
        full_limit=Workload(FULL_CHUNKS, CHUNK_TOKENS, FRESH_TOKENS).tokens,
        with_transformers=False,
        progress=lambda text: lab.progress(text, next(steps), total),
    )
    return list(report.rows)


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    exponents = _exponents(rows)
    for policy in POLICIES:
        points = [(row["context_tokens"], row["ttft_ms"]) for row in rows if row["policy"] == policy]
        label = f"{policy} (N^{exponents[policy]:.2f})" if policy in exponents else policy
        axes.plot(*zip(*points, strict=True), marker="o", markersize=5, label=label)
    lengths = sorted({row["context_tokens"] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="prompt length N (tokens)", ylabel="time to first token (ms)")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()


def _finding(rows: Sequence[Row]) -> str:
    exponents = _exponents(rows)
    grown = "; ".join(f"{policy} {exponent:.2f}" for policy, exponent in exponents.items())
    common = _common(rows)
    lengths = sorted({row["context_tokens"] for row in common})
    growth = (
        f"from {lengths[0]} to {lengths[-1]} tokens, TTFT grows with these powers of the length: {grown} "
        "(1 is linear, 2 quadratic)."
        if exponents
        else "too few lengths for a law of growth."
    )
    return f"{growth} {_at(common, lengths[-1])}{_beyond(rows, lengths[-1])}"


def _at(rows: Sequence[Row], length: int) -> str:
    of = {row["policy"]: row["ttft_ms"] for row in rows if row["context_tokens"] == length}
    ratios = ", ".join(f"{policy} {of['full'] / ttft:.1f} times" for policy, ttft in of.items() if policy != "full")
    return f"At {length} tokens full takes {of['full'] / 1e3:.2g} s, and is beaten by {ratios}."


def _beyond(rows: Sequence[Row], length: int) -> str:
    longest = max(row["context_tokens"] for row in rows)
    if longest == length:
        return ""
    of = {row["policy"]: row["ttft_ms"] for row in rows if row["context_tokens"] == longest}
    ratio = of["cacheblend-15"] / of["attnlink-16"]
    return f" At {longest} tokens, cacheblend-15 takes {ratio:.1f} times as long as attnlink-16."


def _common(rows: Sequence[Row]) -> list[Row]:
    """The rows of prompts that ``full`` was measured on."""
    lengths = {row["context_tokens"] for row in rows if row["policy"] == "full"}
    return [row for row in rows if row["context_tokens"] in lengths]


def _exponents(rows: Sequence[Row]) -> dict[str, float]:
    """By policy, over the lengths that all of them were measured on; empty where these are fewer than three."""
    return {policy: exponent for (policy, _), exponent in scaling_exponents(_common(rows)).items()}


def _table(rows: Sequence[Row]) -> list[Row]:
    """A row per length, with the milliseconds of each policy."""
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
    claim="with chunks of 1024 tokens, the time to first token of full recomputation and of CacheBlend-15 grows "
    "quadratically with the context, that of AttnLink-16 almost linearly.",
    columns=("tokens", *POLICIES),
    measure=_measure,
    draw=_draw,
    finding=_finding,
    table=_table,
    shape=SHAPE,
)
