"""``kvlinker bench``: measure, print a table, write JSON, draw a plot."""

from __future__ import annotations

import typer

from kvlinker.cli.bench.command import BenchmarkGroup

app = typer.Typer(
    help="Benchmarks: every competitor in one run, medians and ratios.",
    no_args_is_help=True,
    cls=BenchmarkGroup,
)
