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
