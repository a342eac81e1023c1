"""CacheBlend, figure 7: how the KV deviation is distributed over the tokens of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from kvlinker.research.bench.report import Row
from kvlinker.research.evaluation.bootstrap import mean_interval
from kvlinker.research.figures.cacheblend.concentration import share_among_top, times_others, top_share
from kvlinker.research.figures.cacheblend.reuse import Reused, reused_tokens
from kvlinker.research.figures.figure import Figure
from kvlinker.research.figures.lab import Lab

EXAMPLES = 105
TOP, WIDER_TOP = 10, 15
"""Percent of the tokens."""
QUANTILES = 101
TAIL = 2.0
"""How many times the others' mean deviation the top's must be to be called much higher."""


def _measure(lab: Lab) -> list[Row]:
    prompts = list(reused_tokens(lab, limit=EXAMPLES))
    layers = prompts[0].deviation.shape[0] if prompts else 0
    return [_row(layer, prompts) for layer in range(1, layers)]  # layer 0 sees a token and its position alone: exact


def _row(layer: int, prompts: Sequence[Reused]) -> Row:
    deviations = [prompt.deviation[layer] for prompt in prompts]
    pooled = np.concatenate(deviations)
    held = [top_share(deviation, TOP) for deviation in deviations]
    low, high = mean_interval(held)
    first = [share_among_top(prompt.deviation[layer], prompt.first, TOP) for prompt in prompts]
    return {
        "layer": layer,
        "n": len(prompts),
        "tokens": len(pooled),
        "median": float(np.median(pooled)),
        "p90": float(np.quantile(pooled, 0.9)),
        "top_10_hold": fmean(held),
        "ci_low": low,
        "ci_high": high,
        "top_15_hold": fmean(top_share(deviation, WIDER_TOP) for deviation in deviations),
        "first_in_top_10": fmean(first),
        "first_in_all": fmean(float(prompt.first.mean()) for prompt in prompts),
        "quantiles": np.quantile(pooled, np.linspace(0, 1, QUANTILES)).tolist(),
    }


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    left, right = canvas.subplots(1, 2, width_ratios=(1.4, 1))
    for row in rows:
        left.plot(row["quantiles"], np.linspace(0, 100, len(row["quantiles"])), label=f"layer {row['layer']}")
    left.axhspan(100 - TOP, 100, color="grey", alpha=0.15)
    left.set(xlabel="KV deviation of a token, ‖KV − KV_full‖", ylabel="tokens (%), cumulative", ylim=(0, 100))
    left.set_xlim(0, max((row["quantiles"][-2] for row in rows), default=1) or 1)  # the last percent would flatten all
    layers = np.arange(len(rows))
    for shift, column, label in (
        (-0.2, "first_in_top_10", f"among the top {TOP}%"),
        (0.2, "first_in_all", "among all tokens"),
    ):
        right.bar(layers + shift, [100 * row[column] for row in rows], 0.4, label=label)
    right.set_xticks(layers, [str(row["layer"]) for row in rows])
    right.set(xlabel="layer", ylabel="first tokens of chunks (%)")
    left.legend(loc="lower right")
    right.legend()


def _finding(rows: Sequence[Row]) -> str:
    if not rows:
        return "no example has tokens that reuse leaves inexact."
    least, most = (pick(rows, key=lambda row: float(row["top_10_hold"])) for pick in (min, max))
    low, high = (times_others(row["top_10_hold"], TOP) for row in (least, most))
    verdict = "a tail, as in the paper" if low >= TAIL else "hardly a tail"
    early, late = rows[0], rows[-1]
    return (
        f"the {TOP}% of tokens that deviate most hold {100 * least['top_10_hold']:.0f}% (layer {least['layer']}) to "
        f"{100 * most['top_10_hold']:.0f}% (layer {most['layer']}) of a layer's deviation, {low:.1f} to {high:.1f} "
        f"times the others' mean: {verdict}. First tokens of chunks are {100 * early['first_in_all']:.1f}% of all "
        f"tokens; among those {TOP}% they are {100 * early['first_in_top_10']:.0f}% in layer {early['layer']} and "
        f"{100 * late['first_in_top_10']:.0f}% in layer {late['layer']}."
    )


FIGURE = Figure(
    name="cacheblend-7",
    title="KV deviation of tokens",
    source="CacheBlend, figure 7",
    claim="after reuse without repair, 10% to 15% of a layer's tokens have a much higher KV deviation than the others.",
    columns=(
        "layer",
        "n",
        "tokens",
        "median",
        "p90",
        "top_10_hold",
        "ci_low",
        "ci_high",
        "top_15_hold",
        "first_in_top_10",
        "first_in_all",
    ),
    measure=_measure,
    draw=_draw,
    finding=_finding,
    size=(10.0, 4.2),
)
