"""Writes the page of figures: a section for each, replaced without a change to the text around
it."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlinker.base.errors import InvalidRequestError
from kvlinker.quality.bench.harness.report import Report, Row, empty_figure, save_figure
from kvlinker_lab.figures.figure import Figure

_WIDTH = 100
"""The columns of a line of prose, as everywhere in the documentation."""

_INTRODUCTION = "# Reproduction\n\nThe papers' figures, measured with kvlinker.\n"


def write_figure(
    page: Path, figure: Figure, report: Report, order: Sequence[str], plots: Path | None = None
) -> None:
    """Write the rows into the folder named like the page, the plot, and the section of the page.

    A section of this figure is replaced; a new one goes where ``order``, the names of all figures,
    puts it. The plot is beside the rows, or in the folder ``plots``.
    """
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    report.write_json(folder / f"{figure.name}.json")
    show_figure(page, figure, order, plots)


def show_figure(
    page: Path, figure: Figure, order: Sequence[str], plots: Path | None = None
) -> None:
    """Draw the stored rows of a figure, and write its section of the page.

    Raises InvalidRequestError if no rows are stored.
    """
    folder = page.with_suffix("")
    stored = folder / f"{figure.name}.json"
    try:
        content: dict[str, Any] = json.loads(stored.read_text(encoding="utf-8"))
        rows: list[Row] = content["results"]
    except (OSError, ValueError, KeyError) as error:
        raise InvalidRequestError(
            f"{stored} has no results of a figure: run it without --redraw."
        ) from error
    plots = folder if plots is None else plots
    plots.mkdir(parents=True, exist_ok=True)
    plot = plots / f"{figure.name}.png"
    canvas = empty_figure(*figure.size)
    figure.draw(canvas, rows)
    save_figure(canvas, plot)
    image = Path(os.path.relpath(plot, page.parent)).as_posix()
    text = page.read_text(encoding="utf-8") if page.exists() else _INTRODUCTION
    part = _part(figure, rows, content, image)
    page.write_text(_insert(text, figure.name, part, order), encoding="utf-8")


def _part(figure: Figure, rows: Sequence[Row], content: Mapping[str, Any], image: str) -> str:
    machine = content["machine"]
    return "\n\n".join(
        [
            f"## {figure.title}",
            _wrap(f"**{figure.source}**: {figure.claim}"),
            _wrap(f"**Here**: {figure.finding(rows)}"),
            f"![{figure.title}]({image})",
            _table(figure.table_rows(rows), figure.columns),
            f"`{content['command']}`",
            _wrap(
                f"{content['settings']['model']} in {content['settings']['dtype']},"
                f" {machine['processor']}, {machine['threads']} threads, kvlinker"
                f" {content['versions']['kvlinker']}, torch {content['versions']['torch']}."
            ),
        ]
    )


def _wrap(paragraph: str) -> str:
    """Break a paragraph into lines, but no word."""
    return textwrap.fill(paragraph, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Make a Markdown table; numbers stand on the right."""
    numeric = [
        all(isinstance(row.get(column), int | float | None) for row in rows) for column in columns
    ]
    lines = [
        "| " + " | ".join(column.replace("_", " ") for column in columns) + " |",
        "|" + "|".join("---:" if right else "---" for right in numeric) + "|",
    ]
    lines += [
        "| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows
    ]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def _insert(text: str, name: str, part: str, order: Sequence[str]) -> str:
    """Return ``text`` with the figure's part between its two comments."""
    block = f"{_begin(name)}\n{part}\n{_end(name)}"
    there = re.compile(f"{re.escape(_begin(name))}.*?{re.escape(_end(name))}", re.DOTALL)
    if there.search(text):
        return there.sub(lambda _: block, text)
    for later in order[order.index(name) + 1 :]:
        if _begin(later) in text:
            return text.replace(_begin(later), f"{block}\n\n{_begin(later)}")
    return f"{text.rstrip()}\n\n{block}\n"


def _begin(name: str) -> str:
    return f"<!-- {name}: written by kvlinker-lab figure {name} -->"


def _end(name: str) -> str:
    return f"<!-- end of {name} -->"
