"""``kvlinker bench``: measure, print a table, write JSON, draw a plot."""

from __future__ import annotations

import typer

from kvlinker.cli.bench import figure, quality, speed, store

app = typer.Typer(help="Benchmarks: every competitor in one run, medians and ratios.", no_args_is_help=True)

for command in (
    speed.ttft,
    speed.decode,
    speed.memory,
    speed.creation,
    speed.overhead,
    store.store,
    store.codecs,
    store.isolation,
    quality.quality,
    figure.figure,
):
    app.command()(command)
