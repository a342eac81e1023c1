"""Draws the figures of a step's rows, for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MEASURES = {
    "ttft_ms": "time to the first token (ms)",
    "ttft_p50_ms": "median time to the first token (ms)",
    "ms_per_step": "a step of decoding (ms)",
}
"""The measures of plots, by column. A plot shows the first one that its rows have."""

NAMES = ("policy", "case", "system", "engine", "rate")
"""The columns that name a bar."""

Rows = Sequence[Mapping[str, Any]]


def bars_of(rows: Rows) -> tuple[str, list[tuple[str, float]]] | None:
    """Return what is measured, and a name and value for each row that has it; None where there is
    nothing to draw."""
    for column, label in MEASURES.items():
        found = [row for row in rows if isinstance(row.get(column), int | float)]
        if found:
            differing = [
                name for name in NAMES if len({row.get(name) for row in found}) > 1
            ] or NAMES[:1]
            return label, [
                (", ".join(str(row[name]) for name in differing if name in row), row[column])
                for row in found
            ]
    return None


def draw(rows: Rows, file: Path) -> bool:
    """Draw a bar for each row to an SVG file. Returns whether there was anything to draw, and
    matplotlib to draw it with."""
    bars = bars_of(rows)
    if bars is None or find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    label, values = bars
    figure = Figure(figsize=(7, 0.8 + 0.3 * len(values)), layout="constrained")
    axes = figure.subplots()
    drawn = axes.barh([name for name, _ in values], [value for _, value in values])
    axes.bar_label(drawn, [f"{value:.3g}" for _, value in values], padding=3)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.margins(x=0.15)
    figure.savefig(file)
    return True
