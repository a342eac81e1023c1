"""Benchmark results as a table, as JSON, and as a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

Row = Mapping[str, Any]

_TEXT_COLUMNS = ("policy", "engine", "system", "case", "dataset", "task", "metric", "tier", "codec", "hidden")


@dataclass(frozen=True)
class Report:
    """One benchmark's outcome; ``rows`` are its results."""

    command: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    rows: Sequence[Row]

    def print(self, console: Console, columns: Sequence[str]) -> None:
        """Those of the named columns that any row has as a table, with machine, versions and settings above it."""
        for title, values in (("machine", self.machine), ("versions", self.versions), ("settings", self.settings)):
            console.print(f"{title}: " + ", ".join(f"{name} {value}" for name, value in values.items()))
        table = Table()
        columns = [column for column in columns if any(column in row for row in self.rows)]
        for column in columns:
            justify: Literal["left", "right"] = "left" if column in _TEXT_COLUMNS else "right"
            table.add_column(column, justify=justify, no_wrap=True)
        for row in self.rows:
            table.add_row(*(_cell(row.get(column)) for column in columns))
        console.print(table)

    def write_json(self, path: Path) -> None:
        content = {
            "command": self.command,
            "machine": self.machine,
            "versions": self.versions,
            "settings": self.settings,
            "results": list(self.rows),
        }
        path.write_text(json.dumps(content, indent=2, default=str) + "\n")


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        digits = 1 if abs(value) >= 10 else 2 if abs(value) > 1 else 3
        return f"{value:.{digits}f}"
    return str(value)
