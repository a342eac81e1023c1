"""Says what a figure is, registers figures by name, and puts them in the order of the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.registry import Registry
from kvlinker.quality.bench.harness.report import Row
from kvlinker_lab.figures.lab import Lab

PAPERS = ("EPIC", "CacheBlend", "Cache-Craft")
"""The papers in the order of the page, as ``Figure.source`` begins; figures of other sources
follow."""


@dataclass(frozen=True)
class Figure:
    """Describes one figure. Everything that is shown follows from the rows that it measures."""

    name: str
    """The name in ``kvlinker-lab figure NAME``."""
    title: str
    source: str
    """The paper and the figure in it, such as "EPIC, figure 6"."""
    claim: str
    """The claim of the source, in our words."""
    columns: Sequence[str]
    """The columns of the table."""
    measure: Callable[[Lab], list[Row]]
    """Measures rows that JSON can hold."""
    draw: Callable[[Any, Sequence[Row]], None]
    """Draws rows onto an empty matplotlib figure."""
    finding: Callable[[Sequence[Row]], str]
    """Describe the measurements, in sentences with figures."""
    table: Callable[[Sequence[Row]], Sequence[Row]] | None = None
    """Picks the rows of the table; None prints all."""
    size: tuple[float, float] = (7.0, 4.5)
    """Width and height in inches."""
    shape: str | None = None
    """The random weights that it times; None where it asks the reader."""

    def table_rows(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return the rows that the table shows."""
        return rows if self.table is None else self.table(rows)


_registry: Registry[Figure] = Registry(
    "figure", own="kvlinker_lab.figures", group="kvlinker.figures"
)


def register(figure: Figure) -> Figure:
    """Make a figure known under its name. Raises ValueError where another figure has the name."""
    return _registry.add(figure.name, figure)


def known_figures() -> Mapping[str, Figure]:
    """Return all registered figures by name, in the order of the page, those of installed packages
    included."""
    return {figure.name: figure for figure in sorted(_registry.known().values(), key=_place)}


def find_figure(name: str) -> Figure:
    """Return the figure of this name. Raises InvalidRequestError, which lists the names, for an
    unknown one."""
    known = known_figures()
    if name not in known:
        raise InvalidRequestError(
            f"There is no figure {name!r}; there are {', '.join(known)}.", param="name"
        )
    return known[name]


def _place(figure: Figure) -> tuple[int, int, str]:
    """Return what figures are sorted by: paper, number in the paper, and name."""
    paper, _, numbered = figure.source.partition(",")
    number = re.search(r"\d+", numbered)
    place = PAPERS.index(paper) if paper in PAPERS else len(PAPERS)
    return place, int(number.group()) if number else 0, figure.name
