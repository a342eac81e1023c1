"""Draws the plots that several figures share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvlinker.quality.bench.harness.report import Row


def quality_over_recomputed(canvas: Any, rows: Sequence[Row], tasks: Sequence[str]) -> None:
    """Draw a panel per task: score with its interval over the recomputed share, a line per family
    of policies."""
    panels = canvas.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
    for axes, task in zip(panels, tasks, strict=True):
        score_lines(axes, [row for row in rows if row["task"] == task])
        axes.set(title=task)
    panels[0].set_ylabel("score")
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)


def score_lines(axes: Any, rows: Sequence[Row]) -> None:
    """Draw scores with their intervals over the recomputed share, a line per family of policies."""
    for family, members in by_family(rows).items():
        if family == "full":
            axes.axhline(members[0]["score"], color="grey", linestyle=":", label="full")
            continue
        points = sorted(members, key=lambda row: row["recomputed_fraction"])
        recomputed = [100 * row["recomputed_fraction"] for row in points]
        style = {"marker": "o", "markersize": 4, "capsize": 2, "linewidth": 1, "label": family}
        axes.errorbar(recomputed, [row["score"] for row in points], reaches(points), **style)
    axes.set(xlabel="recomputed (% of cached tokens)", ylim=(0, 1.02))


def grouped_bars(axes: Any, groups: Mapping[str, Sequence[Row]], labels: Sequence[str]) -> None:
    """Draw a group of bars per label, in each a bar per key of ``groups``: scores with their
    confidence intervals.

    Every sequence of rows has one per label.
    """
    width = 0.8 / len(groups)
    for index, (name, rows) in enumerate(groups.items()):
        at = np.arange(len(rows)) + (index - (len(groups) - 1) / 2) * width
        scores = [row["score"] for row in rows]
        bars = axes.bar(
            at,
            scores,
            width,
            yerr=reaches(rows),
            capsize=2,
            error_kw={"linewidth": 0.8},
            label=name,
        )
        axes.bar_label(bars, [f"{score:.2f}" for score in scores], label_type="center", fontsize=7)
    axes.set_xticks(range(len(labels)), labels)
    axes.set(ylabel="score", ylim=(0, 1.05))
    axes.figure.legend(loc="outside lower center", ncols=6)


def reaches(rows: Sequence[Row]) -> list[list[float]]:
    """Return how far confidence intervals reach below and above their scores, as matplotlib wants
    them."""
    return [
        [row["score"] - row["ci_low"] for row in rows],
        [row["ci_high"] - row["score"] for row in rows],
    ]


def by_family(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows by family: ``cacheblend-15`` and ``cacheblend-30`` are one."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(family_of(row["policy"]), []).append(row)
    return families


def family_of(policy: str) -> str:
    """Return a policy's name without its numbers."""
    return re.sub(r"-[\d.]+", "", policy)


def score_over_ttft(axes: Any, rows: Sequence[Row], title: str) -> None:
    """Draw score over time to first token, a point per policy: a marker and colour per family,
    darker for more.

    A line joins the rows that are ``pareto``, which have a black edge; what lies right of it or
    below is beaten.
    """
    from matplotlib import colormaps

    best = sorted((row["ttft_ms"], row["score"]) for row in rows if row["pareto"] == "yes")
    axes.step(
        [ttft for ttft, _ in best],
        [score for _, score in best],
        "grey",
        where="post",
        linewidth=0.8,
        zorder=1,
    )
    for family, members in by_family(rows).items():
        marker, colours = _STYLES.get(family, ("x", "Greys"))
        for rank, row in enumerate(members):
            colour = colormaps[colours](0.45 + 0.5 * (rank + 1) / len(members))
            edge = "black" if row["pareto"] == "yes" else colour
            axes.scatter(
                row["ttft_ms"],
                row["score"],
                60,
                color=colour,
                edgecolor=edge,
                marker=marker,
                zorder=2,
            )
            axes.scatter(
                [], [], 60, color=colour, marker=marker, label=row["policy"]
            )  # in the legend, without an edge
    axes.set(xlabel="time to first token (ms)", title=title, ylim=(-0.05, 1.05))
    axes.set_xlim(left=0)


_STYLES = {
    "full": ("o", "Greens"),
    "naive": ("o", "Reds"),
    "legolink": ("*", "Blues"),
    "attnlink": ("^", "Blues"),
    "cacheblend": ("s", "Oranges"),
    "cachecraft": ("D", "YlOrBr"),
    "query": ("P", "Purples"),
    "query-sensitive": ("P", "RdPu"),
    "random": ("X", "Greys"),
}
"""Markers and colours by family; EPIC's own where its figures have the policy."""


def points(difference: float) -> str:
    """Tell a difference of scores from 0 to 1 as points: ``-7.1 points``."""
    return f"{100 * difference:+.1f} points"
