"""What a figure is: a claim of a paper, and how it is measured, drawn and summed up here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvlinker.research.bench.report import Row
from kvlinker.research.figures.lab import Lab


@dataclass(frozen=True)
class Figure:
    """One figure. Rows are what it measured; everything that is shown follows from them.

    ``name``: as in ``kvlinker bench figure NAME``. ``source``: whose figure it is. ``claim``: what is seen there, in
    our words. ``measure``: rows that JSON can hold. ``draw``: onto an empty matplotlib figure. ``finding``: what was
    measured, in sentences with figures. ``table``: the rows and ``columns`` to print; None prints all rows.
    """

    name: str
    title: str
    source: str
    claim: str
    columns: Sequence[str]
    measure: Callable[[Lab], list[Row]]
    draw: Callable[[Any, Sequence[Row]], None]
    finding: Callable[[Sequence[Row]], str]
    table: Callable[[Sequence[Row]], Sequence[Row]] | None = None
    size: tuple[float, float] = (7.0, 4.5)
    """Width and height in inches."""
    shape: str | None = None
    """The random weights that it times; None: it asks the reader."""

    def printed(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows that its table shows."""
        return rows if self.table is None else self.table(rows)
