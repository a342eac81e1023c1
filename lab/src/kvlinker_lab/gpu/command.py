"""``kvlinker-lab gpu``: tries everything on this machine's GPU, and writes one report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvlinker_lab.gpu.steps import Outcome

MEASURES = {
    "ttft_ms": "time to the first token (ms)",
    "ttft_p50_ms": "median time to the first token (ms)",
    "ms_per_step": "a step of decoding (ms)",
}
"""The measures of plots, by column. A plot shows the first one that its rows have."""

NAMES = ("policy", "case", "system", "engine", "rate")
"""The columns that name a bar."""


def gpu(
    folder: Annotated[Path, typer.Argument(help="Where reports and logs go.", file_okay=False)],
    shape: Annotated[str, typer.Option(help="Random weights of this shape.")] = "8b",
    minutes: Annotated[float, typer.Option(min=0.5, help="The longest that all may take.")] = 30,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="A tiny shape, also without a GPU: is all there?")
    ] = False,
) -> None:
    """Try kernels, both engines and their benchmarks on a GPU, and write report.md and report.json.

    Nothing is downloaded. A part that fails is reported, and the others go on; the command then
    ends with 1. The report is written anew after each part.
    """
    import torch

    from kvlinker.base.errors import InvalidRequestError
    from kvlinker.cli.bench.common import exit_on_signals
    from kvlinker.cli.console import BAD_USAGE, failures
    from kvlinker.quality.bench.harness.report import describe_machine, versions
    from kvlinker_lab.gpu.steps import first_hour, run

    with failures(BAD_USAGE):
        if not (tiny or torch.cuda.is_available()):
            raise InvalidRequestError("There is no CUDA GPU here; --tiny tries everything without.")
    folder.mkdir(parents=True, exist_ok=True)
    about = describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    outcomes: list[Outcome] = []
    pictures: dict[str, str] = {}
    with exit_on_signals():
        for outcome in run(first_hour("tiny" if tiny else shape, tiny=tiny), folder, 60 * minutes):
            typer.echo(f"{outcome.name}: {outcome.outcome} in {outcome.seconds:.0f} s")
            outcomes.append(outcome)
            picture = f"{len(outcomes)}-{outcome.name.replace(' ', '-')}.svg"
            if draw(outcome.results, folder / picture):
                pictures[outcome.name] = picture
            steps = [asdict(each) for each in outcomes]
            content = {"machine": about, "versions": versions(), "steps": steps}
            (folder / "report.json").write_text(json.dumps(content, indent=2, default=str) + "\n")
            (folder / "report.md").write_text(report(about, outcomes, pictures))
    typer.echo(f"{folder / 'report.md'}")
    if any(each.outcome in ("failed", "too late") for each in outcomes):
        raise typer.Exit(1)


def report(
    machine: Mapping[str, Any],
    outcomes: Sequence[Outcome],
    pictures: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the report as Markdown; ``pictures`` are files by the names of steps."""
    lines = ["# The first hour", "", ", ".join(f"{name} {machine[name]}" for name in machine), ""]
    lines += ["| step | outcome | seconds |", "|---|---|---:|"]
    lines += [f"| {each.name} | {each.outcome} | {each.seconds:.0f} |" for each in outcomes]
    for each in outcomes:
        lines += ["", f"## {each.name}", "", *([f"`{each.command}`", ""] if each.command else [])]
        if each.message:
            lines += ["```", each.message, "```", ""]
        if each.name in pictures:
            lines += [f"![{each.name}]({pictures[each.name]})", ""]
        columns = list(dict.fromkeys(column for row in each.results for column in row))
        if columns:
            lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
            lines += [
                f"| {' | '.join(_cell(row.get(column)) for column in columns)} |"
                for row in each.results
            ]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def bars_of(rows: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[str, float]]] | None:
    """Return the measure, and a name and value for each row that has it; None where there is
    nothing to draw."""
    for column, label in MEASURES.items():
        found = [row for row in rows if isinstance(row.get(column), int | float)]
        if found:
            differing = [
                name for name in NAMES if len({row.get(name) for row in found}) > 1
            ] or NAMES[:1]
            return label, [
                (", ".join(str(row[name]) for name in differing if name in row), row[column])
                for row in found
            ]
    return None


def draw(rows: Sequence[Mapping[str, Any]], file: Path) -> bool:
    """Draw a bar for each row to an SVG file. Returns whether there was anything to draw, and
    matplotlib to draw it with."""
    bars = bars_of(rows)
    if bars is None or find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    label, values = bars
    figure = Figure(figsize=(7, 0.8 + 0.3 * len(values)), layout="constrained")
    axes = figure.subplots()
    drawn = axes.barh([name for name, _ in values], [value for _, value in values])
    axes.bar_label(drawn, [f"{value:.3g}" for _, value in values], padding=3)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.margins(x=0.15)
    figure.savefig(file)
    return True
