"""Plots that several figures share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvlinker.bench.report import Row


def quality_over_recomputed(canvas: Any, rows: Sequence[Row], tasks: Sequence[str]) -> None:
    """A panel per task: score with its confidence interval over the recomputed share, a line per family of policies."""
    panels = canvas.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
    for axes, task in zip(panels, tasks, strict=True):
        shown = [row for row in rows if row["task"] == task]
        for family, members in by_family(shown).items():
            if family == "full":
                axes.axhline(members[0]["score"], color="grey", linestyle=":", label="full")
                continue
            points = sorted(members, key=lambda row: row["recomputed_fraction"])
            scores = [row["score"] for row in points]
            reach = [[r["score"] - r["ci_low"] for r in points], [r["ci_high"] - r["score"] for r in points]]
            recomputed = [100 * row["recomputed_fraction"] for row in points]
            axes.errorbar(recomputed, scores, reach, marker="o", markersize=4, capsize=2, linewidth=1, label=family)
        axes.set(xlabel="recomputed (% of cached tokens)", title=task, ylim=(0, 1.02))
    panels[0].set_ylabel("score")
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)


def by_family(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by their policy's name without its numbers: ``cacheblend-15`` and ``cacheblend-30`` are one family."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(family_of(row["policy"]), []).append(row)
    return families


def family_of(policy: str) -> str:
    """A policy's name without its numbers."""
    return re.sub(r"-[\d.]+", "", policy)


def score_over_ttft(axes: Any, rows: Sequence[Row], title: str) -> None:
    """Score over time to first token, a point per policy: a marker and colour per family, darker for higher numbers.

    A line joins the rows that are ``pareto``, which have a black edge; what lies right of it or below is beaten.
    """
    from matplotlib import colormaps

    best = sorted((row["ttft_ms"], row["score"]) for row in rows if row["pareto"] == "yes")
    axes.step([ttft for ttft, _ in best], [score for _, score in best], "grey", where="post", linewidth=0.8, zorder=1)
    for family, members in by_family(rows).items():
        marker, colours = _STYLES.get(family, ("x", "Greys"))
        for rank, row in enumerate(members):
            colour = colormaps[colours](0.45 + 0.5 * (rank + 1) / len(members))
            edge = "black" if row["pareto"] == "yes" else colour
            axes.scatter(row["ttft_ms"], row["score"], 60, color=colour, edgecolor=edge, marker=marker, zorder=2)
            axes.scatter([], [], 60, color=colour, marker=marker, label=row["policy"])  # in the legend, without an edge
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
    "random": ("X", "Greys"),
}
"""Marker and colours by family; EPIC's own where its figures have the policy."""


def points(difference: float) -> str:
    """A difference of scores from 0 to 1 as points: ``-7.1 points``."""
    return f"{100 * difference:+.1f} points"
