"""Makes a command of every benchmark: its own options, those that name the model, and --json and
--plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature, getdoc, signature
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import typer

from kvlinker.cli.bench.common import (
    MODEL_OPTIONS,
    Json,
    Plot,
    Shape,
    command_line,
    exit_on_signals,
    require_folders,
    show,
)
from kvlinker.cli.console import BAD_USAGE, FAILURE, failures, progress_display
from kvlinker.cli.lazy import LazyGroup, command_of
from kvlinker.cli.options import settings_options
from kvlinker.quality.bench.harness.benchmark import (
    PACKAGE,
    Benchmark,
    Setup,
    declared_benchmarks,
    find_benchmark,
)
from kvlinker.settings import Settings


class BenchmarkGroup(LazyGroup):
    """Lists the benchmarks of a package in addition to its own commands."""

    program: ClassVar = "kvlinker"
    package: ClassVar = PACKAGE

    def summaries(self) -> Mapping[str, str]:
        return {
            name: declared.summary for name, declared in declared_benchmarks(self.package).items()
        }

    def load(self, name: str) -> Any:
        with failures():
            return command_of(name, _function(find_benchmark(name, self.package), self.program))


def _function(benchmark: Benchmark, program: str) -> Callable[..., None]:
    """Make the function of a benchmark's command; its options are its parameters."""
    from kvlinker.quality.bench.harness.report import require_plot

    def run(
        settings: Settings,
        *,
        json: Path | None,
        shape: str | None = None,
        plot: Path | None = None,
        **own: Any,
    ) -> None:
        with failures(BAD_USAGE):
            require_folders(json, plot)
            if plot is not None:
                require_plot(plot)
            with exit_on_signals(), progress_display() as progress:
                report = benchmark.run(
                    Setup(settings, shape, command_line(program), progress), **own
                )
        rows = report.rows if benchmark.shown is None else benchmark.shown(report.rows)
        show(report, json, rows)
        if benchmark.plot is not None and plot is not None:
            with failures(BAD_USAGE):
                benchmark.plot(rows, plot)
        if not report.passed:
            raise typer.Exit(FAILURE)

    types = get_type_hints(benchmark.run, include_extras=True)
    _, *options = signature(benchmark.run).parameters.values()
    parameters = [
        Parameter("settings", Parameter.POSITIONAL_OR_KEYWORD, annotation=Settings),
        *([_option("shape", Shape)] if benchmark.runs_model else []),
        *(
            option.replace(annotation=types[option.name], kind=Parameter.KEYWORD_ONLY)
            for option in options
        ),
        _option("json", Json),
        *([_option("plot", Plot)] if benchmark.plot is not None else []),
    ]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = getdoc(benchmark.run)
    naming = MODEL_OPTIONS if benchmark.runs_model else ()
    return settings_options(*naming, *benchmark.settings)(run)


def _option(name: str, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
