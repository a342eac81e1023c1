"""The ``kvlinker-lab`` command."""

from __future__ import annotations

from typing import ClassVar

import typer

from kvlinker.cli.bench.command import BenchmarkGroup
from kvlinker_lab.advice.command import advise
from kvlinker_lab.certification.command import certify
from kvlinker_lab.figures.command import figure
from kvlinker_lab.gpu.command import gpu
from kvlinker_lab.models.command import models
from kvlinker_lab.random_model import random_model
from kvlinker_lab.tradeoff import tradeoff


class LabGroup(BenchmarkGroup):
    """Lists the laboratory's benchmarks."""

    program: ClassVar = "kvlinker-lab"
    package: ClassVar = "kvlinker_lab"


app = typer.Typer(
    name="kvlinker-lab",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    cls=LabGroup,
)


@app.callback()
def main() -> None:
    """Measure servers under load, certify policies, choose tiers, reproduce the papers' figures.

    Other commands compare engines, run for long, or measure single parts."""


app.command()(advise)
app.command()(certify)
app.command()(figure)
app.command()(gpu)
app.command()(models)
app.command()(random_model)
app.command()(tradeoff)
