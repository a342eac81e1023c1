"""Measures CacheBlend's figure 6: the attention deviation that is left when some tokens are
recomputed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking import Evidence, Policy, highest, parse_policy, share
from kvlinker.prompting.segments import Prompt
from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.evaluation.examples import Question
from kvlinker.quality.evaluation.statistics import mean_interval
from kvlinker_lab.figures.drawing import by_family, family_of
from kvlinker_lab.figures.figure import Figure, register
from kvlinker_lab.figures.lab import Lab, OpenReader
from kvlinker_lab.inspection import attention_deviation, kv_distance

RATIOS = (2, 5, 10, 20, 30, 50)
"""Percentages of the tokens that are recomputed."""
EXAMPLES = 84
"""The number of examples, unless ``--limit`` gives another: a multiple of the seven kinds of
questions, which come in turn."""

ORACLE, CONTROL = "oracle", "random"
KINDS = ("cacheblend", "query", CONTROL)
ENDS = ("naive", "full")
SHOWN_BY_LAYER = ("naive", "random-10", "cacheblend-10", "query-10", "oracle-10")

Sample = tuple[float, tuple[float, ...]]
"""Pairs the recomputed share of one example's cached tokens with its attention deviation by
layer."""


class Chosen(Policy):
    """Recomputes tokens that were chosen beforehand. It is not registered: it knows one prompt."""

    positions: tuple[int, ...]
    """Positions in the prompt."""

    family = "chosen"

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        selected = np.zeros(len(prompt), dtype=np.bool_)
        selected[list(self.positions)] = True
        return selected


def most_deviating(prompt: Prompt, distance: NDArray[np.float32], percent: float) -> Chosen:
    """Choose the r percent of the inexact tokens whose KV really deviates most, over all layers.

    No request could: it would have to compute them first. ``distance`` [layers, tokens] is as from
    ``kv_distance``, of the prompt linked without repair. CacheBlend (section 4.2) chooses anew in
    every layer; here a token is computed in all layers or in none.
    """
    deviation = np.linalg.norm(distance, axis=0)
    count = share(percent, int(prompt.inexact.sum()))
    return Chosen(tuple(np.flatnonzero(highest(deviation, count, among=prompt.inexact)).tolist()))


def _measure(lab: Lab) -> list[Row]:
    samples: dict[str, list[Sample]] = defaultdict(list)
    with lab.open_reader(limit=EXAMPLES) as reader:
        for done, example in enumerate(reader.examples):
            lab.progress("examples", done, len(reader.examples))
            for policy, sample in _samples(reader, example):
                samples[policy].append(sample)
    return [_row(policy, samples) for policy in samples]


def _samples(reader: OpenReader, example: Question) -> Iterator[tuple[str, Sample]]:
    """Measure one example under all policies."""
    messages = reader.messages(example)
    prompt = reader.llm.chat_prompt(messages)
    full, naive = (reader.inspector.inspect(messages, policy) for policy in ("full", "naive"))
    yield "naive", (0.0, attention_deviation(full, naive))
    yield "full", (1.0, (0.0,) * len(full))
    distance = kv_distance(full, naive)
    for ratio in RATIOS:
        policies: dict[str, Policy] = {f"{ORACLE}-{ratio}": most_deviating(prompt, distance, ratio)}
        policies |= {f"{kind}-{ratio}": parse_policy(f"{kind}-{ratio}") for kind in KINDS}
        for name, policy in policies.items():
            answer, views = reader.inspector.answer(messages, policy)
            yield name, (answer.usage.recomputed_fraction, attention_deviation(full, views))


def _row(policy: str, samples: Mapping[str, Sequence[Sample]]) -> Row:
    _, _, ratio = policy.partition("-")
    measured = samples[policy]
    deviations = [fmean(layers) for _, layers in measured]
    low, high = mean_interval(deviations)
    row: dict[str, Any] = {
        "policy": policy,
        "n": len(measured),
        "recomputed_fraction": fmean(recomputed for recomputed, _ in measured),
        "attention_deviation": fmean(deviations),
        "ci_low": low,
        "ci_high": high,
        "layers": [fmean(layer) for layer in zip(*(layers for _, layers in measured), strict=True)],
    }
    if not ratio:
        return row | dict.fromkeys(("vs_random", "vs_random_low", "vs_random_high"))
    control = [fmean(layers) for _, layers in samples[f"{CONTROL}-{ratio}"]]
    differences = [mine - other for mine, other in zip(deviations, control, strict=True)]
    low, high = mean_interval(differences)
    return row | {"vs_random": fmean(differences), "vs_random_low": low, "vs_random_high": high}


def _draw(canvas: Any, rows: Sequence[Row]) -> None:
    left, right = canvas.subplots(1, 2, width_ratios=(1.3, 1))
    swept = by_family([row for row in rows if row["policy"] not in ENDS])
    colours = {family: f"C{index}" for index, family in enumerate(swept)} | dict.fromkeys(
        ENDS, "black"
    )
    for family, members in (
        swept | {end: [row for row in rows if row["policy"] == end] for end in ENDS}
    ).items():
        points = sorted(members, key=lambda row: row["recomputed_fraction"])
        centre = [row["attention_deviation"] for row in points]
        reach = [[row["attention_deviation"] - row["ci_low"] for row in points]]
        reach += [[row["ci_high"] - row["attention_deviation"] for row in points]]
        recomputed = [100 * row["recomputed_fraction"] for row in points]
        style = {
            "marker": "s" if family in ENDS else "o",
            "markersize": 4,
            "elinewidth": 0.6,
            "capsize": 2,
        }
        left.errorbar(recomputed, centre, reach, color=colours[family], label=family, **style)
    left.set(
        xlabel="recomputed (% of cached tokens)",
        ylabel="attention deviation ‖A − A_full‖, mean over layers",
    )
    left.set_ylim(bottom=0)
    left.legend()
    for row in rows:
        if row["policy"] in SHOWN_BY_LAYER:
            colour = colours[family_of(row["policy"])]
            right.plot(row["layers"], marker="o", markersize=4, color=colour, label=row["policy"])
    right.set(xlabel="layer", ylabel="attention deviation ‖A − A_full‖")
    right.set_ylim(bottom=0)
    right.legend(loc="lower right")


def _finding(rows: Sequence[Row]) -> str:
    by_policy = {row["policy"]: row for row in rows}

    def remainder(policy: str) -> float:
        """Return the deviation in percent of naive's."""
        naive: float = by_policy["naive"]["attention_deviation"]
        return 100 * float(by_policy[policy]["attention_deviation"]) / naive if naive else 0.0

    if not by_policy["naive"]["attention_deviation"]:
        return "reuse without repair changes no attention here."
    oracle = by_policy[f"{ORACLE}-10"]
    if oracle["vs_random_high"] < 0:
        verdict = "the tokens that deviate most matter most"
    elif oracle["vs_random_low"] > 0:
        verdict = "the tokens that deviate most matter less than others"
    else:
        verdict = "no significant difference"
    tenth = remainder(f"{ORACLE}-10")
    first, second = 100 - tenth, tenth - remainder(f"{ORACLE}-20")
    blend = by_policy["cacheblend-10"]
    return (
        f"recomputing the 10% of tokens that truly deviate most leaves {tenth:.0f}%"
        f" of naive's attention deviation, a random 10% leaves {remainder(f'{CONTROL}-10'):.0f}%:"
        f" {verdict}. The first 10% of them take {first:.0f} points off, the next 10% another"
        f" {second:.0f}. cacheblend-10, which recomputes {100 * blend['recomputed_fraction']:.0f}%"
        f" in a model of {len(blend['layers'])} layers, leaves {remainder('cacheblend-10'):.0f}%;"
        f" query-10 leaves {remainder('query-10'):.0f}%."
    )


def _table_rows(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["policy"].partition("-")[2] not in ("2", "30")]


FIGURE = Figure(
    name="cacheblend-6",
    title="Attention deviation against the share recomputed",
    source="CacheBlend, figure 6",
    claim=(
        "the forward attention comes closer to a full prefill's with every token recomputed, and"
        " the tokens with the highest KV deviation bring most of it. Here, `oracle-r` recomputes"
        " the r percent of tokens with the highest true deviation over all layers."
    ),
    columns=(
        "policy",
        "n",
        "recomputed_fraction",
        "attention_deviation",
        "ci_low",
        "ci_high",
        "vs_random",
        "vs_random_low",
        "vs_random_high",
    ),
    measure=_measure,
    draw=_draw,
    finding=_finding,
    table=_table_rows,
    size=(11.0, 4.4),
)
register(FIGURE)
