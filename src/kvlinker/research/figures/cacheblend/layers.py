"""CacheBlend, figure 8: whether the tokens that deviate in one layer also do in the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from kvlinker.research.bench.report import Row
from kvlinker.research.evaluation.bootstrap import mean_interval
from kvlinker.research.evaluation.correlation import spearman
from kvlinker.research.figures.cacheblend.reuse import Reused, reused_tokens
from kvlinker.research.figures.figure import Figure
from kvlinker.research.figures.lab import Lab

EXAMPLES = 105
STRONG = 0.5


def _measure(lab: Lab) -> list[Row]:
    prompts = list(reused_tokens(lab, limit=EXAMPLES))
    layers = prompts[0].deviation.shape[0] if prompts else 0
    pairs = [(layer, layer + 1) for layer in range(1, layers - 1)]  # in layer 0 nothing deviates
    pairs += [(1, layer) for layer in range(3, layers)]
    return [row for pair in pairs for row in _rows(pair, prompts)]


def _rows(pair: tuple[int, int], prompts: Iterable[Reused]) -> list[Row]:
    """One, or none where no prompt has a correlation."""
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


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    for members, label in (
        (_neighbours(rows), "a layer and the one before"),
        (_from_first(rows), "a layer and layer 1"),
    ):
        centre = [row["correlation"] for row in members]
        reach = [[row["correlation"] - row["ci_low"] for row in members]]
        reach += [[row["ci_high"] - row["correlation"] for row in members]]
        axes.errorbar([row["second"] for row in members], centre, reach, marker="o", capsize=3, label=label)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xticks(sorted({row["second"] for row in rows}))
    axes.set(xlabel="layer", ylabel="Spearman's rank correlation of KV deviations")
    axes.set_ylim(min([0.0, *(row["ci_low"] for row in rows)]), 1.02)
    axes.legend(loc="lower left")


def _finding(rows: Sequence[Row]) -> str:
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
    told = f"between neighbouring layers the mean correlation is {lowest:.2f} to {highest:.2f}: {verdict}."
    furthest = _from_first(rows)[-1]
    if furthest["second"] > neighbours[0]["second"]:
        told += (
            f" Between layer 1, which CacheBlend starts from, and layer {furthest['second']} it is "
            f"{furthest['correlation']:.2f}."
        )
    return told


def _neighbours(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["second"] == row["first"] + 1]


def _from_first(rows: Sequence[Row]) -> list[Row]:
    return sorted((row for row in rows if row["first"] == 1), key=lambda row: int(row["second"]))


FIGURE = Figure(
    name="cacheblend-8",
    title="KV deviation from layer to layer",
    source="CacheBlend, figure 8",
    claim="tokens that deviate most in one layer are likely to do so in the next: the rank correlation of the tokens' "
    "KV deviations in neighbouring layers is consistently high.",
    columns=("layers", "n", "correlation", "ci_low", "ci_high"),
    measure=_measure,
    draw=_draw,
    finding=_finding,
)
