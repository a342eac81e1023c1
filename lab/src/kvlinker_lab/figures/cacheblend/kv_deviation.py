"""Measures CacheBlend's figures 7 and 8: the KV deviation over the tokens of a layer, and from
layer to layer.

Figure 7 is its distribution, figure 8 whether the tokens that deviate in one layer also do in the
next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking import highest, share
from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.evaluation.statistics import mean_interval
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.lab import Lab
from kvlinker_lab.inspection import kv_distance
from kvlinker_lab.statistics import spearman

EXAMPLES = 105
"""The number of examples, unless ``--limit`` gives another: a multiple of the seven kinds of
questions, which come in turn."""

TOP, WIDER_TOP = 10, 15
"""Percentages of the tokens that are looked at."""
QUANTILES = 101
"""The quantiles of deviations that are stored: one for each percent."""

TAIL = 2.0
"""The factor over the others' mean deviation from which the top's is called much higher."""
STRONG = 0.5
"""The correlation from which ranks are called kept."""


@dataclass(frozen=True, eq=False)
class ReusedTokens:
    """Holds the tokens of one prompt under ``naive`` that come from chunks whose KV is not
    exact."""

    deviation: NDArray[np.float32]
    """KV deviation from a full prefill, [layers, tokens]."""
    first: NDArray[np.bool_]
    """True where a chunk starts, [tokens]."""


def reused_tokens(lab: Lab, *, limit: int) -> Iterator[ReusedTokens]:
    """Reuse every example's chunks without repair; examples without such tokens are left out."""
    with lab.open_reader(limit=limit) as reader:
        for done, example in enumerate(reader.examples):
            lab.progress("examples", done, len(reader.examples))
            messages = reader.messages(example)
            prompt = reader.llm.chat_prompt(messages)
            full, naive = (
                reader.inspector.inspect(messages, policy) for policy in ("full", "naive")
            )
            starts = np.zeros(len(prompt), dtype=np.bool_)
            starts[[span.start for span in prompt.spans]] = True
            if prompt.inexact.any():
                yield ReusedTokens(
                    kv_distance(full, naive)[:, prompt.inexact], starts[prompt.inexact]
                )


def top_share(values: NDArray[np.floating], percent: float) -> float:
    """Return the share of the sum that the highest ``percent`` of the values [n], none negative,
    hold.

    Where all are 0, it is their share of n.
    """
    top = highest(values, share(percent, len(values)))
    total = float(values.sum(dtype=np.float64))
    return float(values[top].sum(dtype=np.float64)) / total if total else float(top.mean())


def times_others(held: float, percent: float) -> float:
    """Return the mean of the highest ``percent``, which hold ``held`` of the sum, over the mean of
    all others."""
    return held / percent * (100 - percent) / (1 - held) if held < 1 else math.inf


def share_among_top(
    values: NDArray[np.floating], marked: NDArray[np.bool_], percent: float
) -> float:
    """Return the share of the highest ``percent`` of the values [n] that are ``marked`` [n]."""
    return float(marked[highest(values, share(percent, len(values)))].mean())


def _measure_tail(lab: Lab) -> list[Row]:
    prompts = list(reused_tokens(lab, limit=EXAMPLES))
    layers = prompts[0].deviation.shape[0] if prompts else 0
    return [
        _tail_row(layer, prompts) for layer in range(1, layers)
    ]  # layer 0 sees a token and its position alone: exact


def _tail_row(layer: int, prompts: Sequence[ReusedTokens]) -> Row:
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


def _draw_tail(canvas: Any, rows: Sequence[Row]) -> None:
    left, right = canvas.subplots(1, 2, width_ratios=(1.4, 1))
    for row in rows:
        left.plot(
            row["quantiles"],
            np.linspace(0, 100, len(row["quantiles"])),
            label=f"layer {row['layer']}",
        )
    left.axhspan(100 - TOP, 100, color="grey", alpha=0.15)
    left.set(
        xlabel="KV deviation of a token, ‖KV − KV_full‖",
        ylabel="tokens (%), cumulative",
        ylim=(0, 100),
    )
    left.set_xlim(
        0, max((row["quantiles"][-2] for row in rows), default=1) or 1
    )  # the last percent would flatten all
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


def _tail_finding(rows: Sequence[Row]) -> str:
    if not rows:
        return "no example has tokens that reuse leaves inexact."
    least, most = (pick(rows, key=lambda row: float(row["top_10_hold"])) for pick in (min, max))
    low, high = (times_others(row["top_10_hold"], TOP) for row in (least, most))
    verdict = "a tail, as in the paper" if low >= TAIL else "hardly a tail"
    early, late = rows[0], rows[-1]
    return (
        f"the {TOP}% of tokens that deviate most hold {100 * least['top_10_hold']:.0f}% (layer"
        f" {least['layer']}) to {100 * most['top_10_hold']:.0f}% (layer {most['layer']}) of a"
        f" layer's deviation, {low:.1f} to {high:.1f} times the others' mean: {verdict}. First"
        f" tokens of chunks are {100 * early['first_in_all']:.1f}% of all tokens; among those"
        f" {TOP}% they are {100 * early['first_in_top_10']:.0f}% in layer {early['layer']} and"
        f" {100 * late['first_in_top_10']:.0f}% in layer {late['layer']}."
    )


TAIL_FIGURE = Figure(
    name="cacheblend-7",
    title="KV deviation of tokens",
    source="CacheBlend, figure 7",
    claim=(
        "after reuse without repair, 10% to 15% of a layer's tokens have a much higher KV deviation"
        " than the others."
    ),
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
    measure=_measure_tail,
    draw=_draw_tail,
    finding=_tail_finding,
    size=(10.0, 4.2),
)
register(TAIL_FIGURE)


def _measure_ranks(lab: Lab) -> list[Row]:
    prompts = list(reused_tokens(lab, limit=EXAMPLES))
    layers = prompts[0].deviation.shape[0] if prompts else 0
    pairs = [(layer, layer + 1) for layer in range(1, layers - 1)]  # in layer 0 nothing deviates
    pairs += [(1, layer) for layer in range(3, layers)]
    return [row for pair in pairs for row in _rank_rows(pair, prompts)]


def _rank_rows(pair: tuple[int, int], prompts: Iterable[ReusedTokens]) -> list[Row]:
    """Make a row, or none where no prompt has a correlation."""
    first, second = pair
    found = [spearman(prompt.deviation[first], prompt.deviation[second]) for prompt in prompts]
    values = [value for value in found if value is not None]
    if not values:
        return []
    low, high = mean_interval(values)
    return [
        {
            "layers": f"{first}, {second}",
            "first": first,
            "second": second,
            "n": len(values),
            "correlation": fmean(values),
            "ci_low": low,
            "ci_high": high,
        }
    ]


def _draw_ranks(canvas: Any, rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    for members, label in (
        (_neighbours(rows), "a layer and the one before"),
        (_from_first(rows), "a layer and layer 1"),
    ):
        centre = [row["correlation"] for row in members]
        reach = [[row["correlation"] - row["ci_low"] for row in members]]
        reach += [[row["ci_high"] - row["correlation"] for row in members]]
        axes.errorbar(
            [row["second"] for row in members], centre, reach, marker="o", capsize=3, label=label
        )
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xticks(sorted({row["second"] for row in rows}))
    axes.set(xlabel="layer", ylabel="Spearman's rank correlation of KV deviations")
    axes.set_ylim(min([0.0, *(row["ci_low"] for row in rows)]), 1.02)
    axes.legend(loc="lower left")


def _ranks_finding(rows: Sequence[Row]) -> str:
    neighbours = _neighbours(rows)
    if not neighbours:
        return "the model has no two layers whose deviations can be compared."
    values = [row["correlation"] for row in neighbours]
    lowest, highest = min(values), max(values)
    if lowest >= STRONG:
        verdict = "as in the paper, the ranks are kept"
    elif min(row["ci_low"] for row in neighbours) > 0:
        verdict = "the ranks are kept in part"
    else:
        verdict = "not everywhere: no effect between " + "; ".join(
            row["layers"].replace(", ", " and ") for row in neighbours if row["ci_low"] <= 0
        )
    text = (
        f"between neighbouring layers the mean correlation is {lowest:.2f} to {highest:.2f}:"
        f" {verdict}."
    )
    furthest = _from_first(rows)[-1]
    if furthest["second"] > neighbours[0]["second"]:
        text += (
            f" Between layer 1, which CacheBlend starts from, and layer {furthest['second']} it is "
            f"{furthest['correlation']:.2f}."
        )
    return text


def _neighbours(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["second"] == row["first"] + 1]


def _from_first(rows: Sequence[Row]) -> list[Row]:
    return sorted((row for row in rows if row["first"] == 1), key=lambda row: int(row["second"]))


RANKS_FIGURE = Figure(
    name="cacheblend-8",
    title="KV deviation from layer to layer",
    source="CacheBlend, figure 8",
    claim=(
        "tokens that deviate most in one layer are likely to do so in the next: the rank"
        " correlation of the tokens' KV deviations in neighbouring layers is consistently high."
    ),
    columns=("layers", "n", "correlation", "ci_low", "ci_high"),
    measure=_measure_ranks,
    draw=_draw_ranks,
    finding=_ranks_finding,
)
register(RANKS_FIGURE)
