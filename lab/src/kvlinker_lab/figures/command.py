"""``kvlinker-lab figure``: the figures of the papers, measured anew."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvlinker.cli.bench.common import (
    MODEL_OPTIONS,
    QUALITY_OPTIONS,
    exit_on_signals,
    require_folders,
)
from kvlinker.cli.console import BAD_USAGE, failures, progress_display
from kvlinker.cli.options import settings_options
from kvlinker.settings import Settings


@settings_options(*MODEL_OPTIONS, *QUALITY_OPTIONS)
def figure(
    settings: Settings,
    name: Annotated[
        str,
        typer.Argument(help="Name of the figure, or all; list shows their names.", metavar="NAME"),
    ],
    page: Annotated[
        Path, typer.Option(help="Write the figure into this page.", dir_okay=False)
    ] = Path("reproduction.md"),
    plots: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the plots; by default the one of the rows, beside the page.",
            file_okay=False,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Examples of each measurement.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="Random weights to time (tiny, 285m, 8b).")
    ] = None,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Measure nothing: show stored results again.")
    ] = False,
) -> None:
    """Measure a figure of the papers anew: a plot, a table, and the paper's claim beside them."""
    from kvlinker_lab.figures.figure import find_figure, known_figures
    from kvlinker_lab.figures.lab import Lab
    from kvlinker_lab.figures.page import show_figure, write_figure

    known = known_figures()
    if name == "list":
        for one in known.values():
            typer.echo(f"{one.name:24} {one.source}: {one.title}")
        return
    with failures(BAD_USAGE):
        require_folders(page)
        for one in known.values() if name == "all" else [find_figure(name)]:
            if redraw:
                show_figure(page, one, list(known), plots)
                continue
            command = shlex.join(
                ["kvlinker-lab", *(one.name if word == "all" else word for word in sys.argv[1:])]
            )
            with exit_on_signals(), progress_display() as progress:
                rows = one.measure(lab := Lab(settings, command, limit, shape, progress))
            write_figure(page, one, lab.report(rows, one.shape), list(known), plots)
            typer.echo(f"{one.name}: {one.finding(rows)}")
