"""Measures Cache-Craft's figure 15: deviation against the share recomputed, by the order in which
tokens are taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from kvlinker.linking import Policy, parse_policy
from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.evaluation.statistics import mean_interval
from kvlinker_lab.figures.cachecraft.earlier_prompts import ContextOrder, EarlierPrompts, ask
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.lab import Lab
from kvlinker_lab.inspection import attention_deviation, relative_kv_distance

EXAMPLES = 56
"""The number of examples, unless ``--limit`` gives another: a multiple of the seven kinds of
questions, which come in turn."""

PERCENTS = (10, 30, 50, 70)
ORDERS: dict[str, Callable[[int], Policy]] = {
    "inter": ContextOrder,
    "random": lambda percent: parse_policy(f"random-{percent}"),
    "h2o": lambda percent: parse_policy(f"h2o-{percent}"),
    "query": lambda percent: parse_policy(f"query-{percent}"),
}
TITLES = {
    "inter": "most inter attention (Cache-Craft)",
    "random": "random",
    "h2o": "most attended in the chunk (H2O)",
    "query": "most attended by the question",
}
KV, ATTENTION = "kv", "attention"


def _measure(lab: Lab) -> list[Row]:
    found: dict[tuple[str, str, int], list[float]] = {}
    with lab.open_reader(limit=EXAMPLES) as reader:
        earlier = EarlierPrompts(reader.llm, reader.examples)
        for done, example in enumerate(reader.examples):
            lab.progress("orders", done, len(reader.examples))
            chunks = [reader.llm.builder.encode_chunk(passage) for passage in example.passages]
            prompt = earlier(example, ask(reader.llm, chunks, example.question))
            if not prompt.inexact.any():
                continue
            full = reader.inspector.inspect_prompt(prompt, "full")
            naive = reader.inspector.inspect_prompt(prompt, "naive")
            for order, policy_of in ORDERS.items():
                for percent in (0, *PERCENTS):
                    views = (
                        reader.inspector.inspect_prompt(prompt, policy_of(percent))
                        if percent
                        else naive
                    )
                    kv = float(relative_kv_distance(full, views)[:, prompt.inexact].mean())
                    found.setdefault((KV, order, percent), []).append(kv)
                    attention = fmean(attention_deviation(full, views))
                    found.setdefault((ATTENTION, order, percent), []).append(attention)
    return [_row(*key, values, found[key[0], "random", key[2]]) for key, values in found.items()]


def _row(
    of: str, order: str, percent: int, values: Sequence[float], random: Sequence[float]
) -> Row:
    """Make a row; ``vs_random`` is the mean of the paired differences from the random order at the
    same share."""
    interval, differences = (
        mean_interval(values),
        [a - b for a, b in zip(values, random, strict=True)],
    )
    return {
        "deviation_of": of,
        "order": order,
        "percent": percent,
        "n": len(values),
        "deviation": fmean(values),
        "ci_low": interval.low,
        "ci_high": interval.high,
        "vs_random": fmean(differences),
        "vs_random_low": mean_interval(differences).low,
        "vs_random_high": mean_interval(differences).high,
    }


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    panels = canvas.subplots(1, 2)
    for axes, of, label in zip(
        panels,
        (KV, ATTENTION),
        ("relative KV deviation", "deviation of the question's attention"),
        strict=True,
    ):
        for order, title in TITLES.items():
            points = [row for row in rows if (row["deviation_of"], row["order"]) == (of, order)]
            means = [row["deviation"] for row in points]
            reach = [
                [r["deviation"] - r["ci_low"] for r in points],
                [r["ci_high"] - r["deviation"] for r in points],
            ]
            shares = [row["percent"] for row in points]
            axes.errorbar(
                shares, means, reach, marker="o", markersize=4, capsize=2, linewidth=1, label=title
            )
        axes.set(xlabel="recomputed (% of each chunk's tokens)", ylabel=label, ylim=(0, None))
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)


def _finding(rows: Sequence[Row]) -> str:
    if not rows:
        return "no chunk had anything to recompute."
    of = {(row["deviation_of"], row["order"], row["percent"]): row for row in rows}
    start = of[KV, "inter", 0]["deviation"]
    falling = ", ".join(
        f"{of[KV, 'inter', percent]['deviation']:.3f} at {percent}%" for percent in PERCENTS
    )
    verdicts = {order: _verdict(of[KV, order, 30]) for order in ORDERS if order != "random"}
    attention = {order: _verdict(of[ATTENTION, order, 30]) for order in ("inter", "query")}
    return (
        f"in Cache-Craft's order the relative KV deviation of reused tokens falls from {start:.3f}"
        f" to {falling}. At 30%, random tokens leave {of[KV, 'random', 30]['deviation']:.3f}."
        f" Compared with that, the tokens with most inter attention leave {verdicts['inter']},"
        f" those the chunk attends to most {verdicts['h2o']}, and those the question attends to"
        f" most {verdicts['query']}. As to the question's attention, Cache-Craft's order leaves"
        f" {attention['inter']} compared with random, the question's order {attention['query']}."
        " Any order falls, since a token that is computed again deviates little; what an order is"
        " worth is its distance from random."
    )


def _verdict(row: Row) -> str:
    """Say how much more or less than random is left, in percent of what random leaves."""
    if row["vs_random_low"] <= 0 <= row["vs_random_high"]:
        return "no clearly different deviation"
    random = row["deviation"] - row["vs_random"]
    return f"{abs(row['vs_random']) / random:.0%} {'less' if row['vs_random'] < 0 else 'more'}"


FIGURE = Figure(
    name="cachecraft-15",
    title="Deviation against the share recomputed",
    source="Cache-Craft, figure 15",
    claim=(
        "the more of its most contextualised tokens are recomputed, the less a reused chunk's"
        " output deviates."
    ),
    columns=(
        "deviation_of",
        "order",
        "percent",
        "n",
        "deviation",
        "ci_low",
        "ci_high",
        "vs_random",
    ),
    measure=_measure,
    draw=_draw,
    finding=_finding,
    table=lambda rows: [
        row for row in rows if row["percent"] in (0, 10, 30, 70) and row["deviation_of"] == KV
    ],
    size=(11.0, 4.5),
)
register(FIGURE)
