"""Makes rows of runs under load, and draws them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvlinker.quality.bench.harness.report import Row, empty_figure, save_figure
from kvlinker_lab.load.driver import ClosedLoop, Load, LoadRun, OpenLoop, RequestResult

COLUMNS = (
    "policy",
    "engine",
    "rate",
    "users",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "requests_per_s",
    "ratio_to_full",
    "goodput_per_s",
    "tokens_per_s",
    "failed",
    "recomputed_fraction",
    "cached_fraction",
    "memory_mb",
)


@dataclass(frozen=True, slots=True)
class ServiceObjective:
    """The limits within which an answer counts as good."""

    ttft_seconds: float
    """The longest time to the first token."""
    tpot_seconds: float
    """The longest mean time between two tokens."""

    def met_by(self, result: RequestResult) -> bool:
        """Return whether a request was answered completely and in time."""
        if result.failure is not None or result.first_token is None:
            return False
        return (
            result.first_token <= self.ttft_seconds
            and (result.seconds_per_token or 0.0) <= self.tpot_seconds
        )


def load_row(
    policy: str,
    engine: str,
    load: Load,
    run: LoadRun,
    objective: ServiceObjective,
    *,
    memory_mb: float | None,
) -> Row:
    """Make the row of one run. Percentiles are over all requests: those that failed took for ever,
    and a percentile that one of them has is None. Shares are over all complete answers, None if the
    server does not report them."""
    complete = [result for result in run.results if result.failure is None]
    failures = Counter(result.failure for result in run.results if result.failure is not None)
    never: list[float | None] = [None] * failures.total()
    ttft = never + [result.first_token for result in complete]
    tpot = never + [result.seconds_per_token for result in complete if result.output_tokens > 1]
    latency = never + [result.ended for result in complete]
    usages = [result.usage for result in complete if result.usage is not None]
    prompt = _sum(usage.prompt_tokens for usage in usages)
    cached = _sum(usage.cached_tokens for usage in usages)
    recomputed = _sum(usage.recomputed_tokens for usage in usages)
    return {
        "policy": policy,
        "engine": engine,
        "rate": load.rate if isinstance(load, OpenLoop) else None,
        "users": load.users if isinstance(load, ClosedLoop) else None,
        "requests": len(run.results),
        "prompt_tokens": None if not usages or prompt is None else prompt / len(usages),
        "ttft_p50_ms": _percentile_ms(ttft, 50),
        "ttft_p99_ms": _percentile_ms(ttft, 99),
        "tpot_p50_ms": _percentile_ms(tpot, 50),
        "tpot_p99_ms": _percentile_ms(tpot, 99),
        "latency_p50_ms": _percentile_ms(latency, 50),
        "latency_p99_ms": _percentile_ms(latency, 99),
        "requests_per_s": len(complete) / run.seconds,
        "goodput_per_s": sum(map(objective.met_by, run.results)) / run.seconds,
        "tokens_per_s": sum(result.output_tokens for result in complete) / run.seconds,
        "failed": failures.total(),
        "failures": dict(sorted(failures.items())),
        "recomputed_fraction": None
        if cached is None or recomputed is None
        else _share(recomputed, cached + recomputed),
        "cached_fraction": None if cached is None or prompt is None else _share(cached, prompt),
        "memory_mb": memory_mb,
    }


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Add to each row its requests per second over those of ``full``, in the same engine and under
    the same load."""
    full = {_case(row): row["requests_per_s"] for row in rows if row["policy"] == "full"}
    return [
        {
            **row,
            "ratio_to_full": row["requests_per_s"] / base
            if (base := full.get(_case(row)))
            else None,
        }
        for row in rows
    ]


def plot_load(rows: Sequence[Row], path: Path) -> None:
    """Draw the time to the first token over the rate, over the number of users, or both, with
    goodput beneath.

    Raises InvalidRequestError without matplotlib, and for a file name whose ending it does not
    know.
    """
    axes_of = {
        column: label
        for column, label in _LOADS.items()
        if any(row[column] is not None for row in rows)
    }
    figure = empty_figure(6.5 * len(axes_of), 7)
    panels = figure.subplots(2, len(axes_of), squeeze=False, sharex="col")
    for (above, below), (column, label) in zip(panels.T, axes_of.items(), strict=True):
        shown = [row for row in rows if row[column] is not None]
        draw_over_load(above, shown, column, "ttft_p50_ms")
        draw_over_load(above, shown, column, "ttft_p99_ms", linestyle=":", alpha=0.6)
        draw_over_load(below, shown, column, "goodput_per_s")
        above.set(
            yscale="log", ylabel="time to first token (ms)", title="median; 99th percentile dotted"
        )
        below.set(xlabel=label, ylabel="good answers per second")
        below.set_ylim(bottom=0)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    save_figure(figure, path)


_LOADS = {"rate": "requests per second", "users": "users"}
"""The label of the horizontal axis, by column."""


def draw_over_load(axes: Any, rows: Sequence[Row], load: str, value: str, **style: Any) -> None:
    """Draw one column of the rows over another, a line per policy and engine. None is left out.

    Every policy and engine has its colour; solid lines alone have labels, so that a legend has each
    once.
    """
    systems = list(dict.fromkeys((row["policy"], row["engine"]) for row in rows))
    engines = {engine for _, engine in systems}
    for index, (policy, engine) in enumerate(systems):
        points = sorted(
            (row[load], row[value])
            for row in rows
            if (row["policy"], row["engine"]) == (policy, engine) and row[value] is not None
        )
        label = (
            {}
            if "linestyle" in style
            else {"label": policy if len(engines) == 1 else f"{policy} ({engine})"}
        )
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, color=f"C{index % 10}", marker="o", markersize=4, **label, **style)


def _case(row: Row) -> tuple[Any, ...]:
    return row["engine"], row["rate"], row["users"]


def _percentile_ms(seconds: Sequence[float | None], percent: float) -> float | None:
    """Return the nearest-rank percentile in milliseconds, None counting as infinity; None for that,
    and of nothing."""
    if not seconds:
        return None
    values = [np.inf if one is None else one for one in seconds]
    found = float(np.percentile(values, percent, method="inverted_cdf"))
    return 1e3 * found if np.isfinite(found) else None


def _sum(values: Iterable[int | None]) -> int | None:
    """Add up numbers; None if any is None."""
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
