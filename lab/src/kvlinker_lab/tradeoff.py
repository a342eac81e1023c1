"""Joins the results of ``kvlinker bench quality`` and ``kvlinker bench ttft``: what a policy costs
in answers, over the time that it takes to the first token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvlinker.base.errors import InvalidRequestError
from kvlinker.cli.console import BAD_USAGE, failures, output_console
from kvlinker.quality.bench.harness.report import empty_figure, require_plot, save_figure

MEASURE = "answer_kl"


@dataclass(frozen=True)
class Point:
    """A policy's measurements on a model and a data set."""

    model: str
    dataset: str
    policy: str
    examples: int
    kl: float
    """The mean KL divergence from ``full`` along its answers, in nats."""
    low: float
    high: float
    """The bounds of its 95% interval."""
    milliseconds: float
    """The time to the first token."""
    speedup: float | None
    """The time of ``full`` over it."""

    def is_beaten(self, others: Sequence[Point]) -> bool:
        """Return whether another policy is as fast, and nearer to ``full``."""
        return any(
            (other.model, other.dataset) == (self.model, self.dataset)
            and other.milliseconds <= self.milliseconds
            and other.kl < self.kl
            for other in others
        )


def tradeoff(
    results: Annotated[
        list[Path],
        typer.Argument(help="JSON files of kvlinker bench quality and kvlinker bench ttft."),
    ],
    plot: Annotated[Path | None, typer.Option(help="Draw the points to this file.")] = None,
) -> None:
    """Show what each policy costs in answers beside its time to the first token.

    A star marks the frontier: no policy is as fast and nearer to full.
    """
    with failures(BAD_USAGE):
        if plot is not None:
            require_plot(plot)
        points = join_results([json.loads(path.read_text()) for path in results])
        if plot is not None:
            plot_points(points, plot)
    table = Table()
    for column in ("model", "dataset", "policy"):
        table.add_column(column)
    for column in ("n", "kl", "low", "high", "ms", "speedup", ""):
        table.add_column(column, justify="right")
    for point in points:
        table.add_row(
            point.model,
            point.dataset,
            point.policy,
            str(point.examples),
            f"{point.kl:.3f}",
            f"{point.low:.3f}",
            f"{point.high:.3f}",
            f"{point.milliseconds:.0f}",
            "" if point.speedup is None else f"{point.speedup:.1f}",
            "" if point.is_beaten(points) else "*",
        )
    output_console().print(table)


def join_results(results: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Return a point for each policy that both benchmarks measured on a model, the fastest of each
    model and data set first.

    Raises InvalidRequestError for results of another benchmark, for times of prompts of several
    lengths, and where there is no such policy.
    """
    lengths: set[int] = set()
    times: dict[tuple[str, str], Mapping[str, Any]] = {}
    answers: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for result in results:
        rows, model = result["results"], result["settings"]["model"]
        if all("ttft_ms" in row for row in rows):
            lengths |= {row["context_tokens"] for row in rows}
            if len(lengths) > 1:
                raise InvalidRequestError(
                    "Times of prompts of several lengths are no points: give kvlinker bench ttft's"
                    " --chunks one number, the same for all results.",
                    param="results",
                )
            times |= {(model, row["policy"]): row for row in rows if row["engine"] == "embedded"}
        elif all("metric" in row for row in rows):
            measured = [row for row in rows if row["metric"] == MEASURE]
            # The mean over all tasks comes behind those of each.
            answers |= {(model, row["dataset"], row["policy"]): row for row in measured}
        else:
            raise InvalidRequestError(
                f"{result['command']!r} is neither kvlinker bench quality nor kvlinker bench ttft.",
                param="results",
            )
    points = [
        Point(
            model,
            dataset,
            policy,
            row["n"],
            row["score"],
            row["ci_low"],
            row["ci_high"],
            times[model, policy]["ttft_ms"],
            times[model, policy]["speedup"],
        )
        for (model, dataset, policy), row in answers.items()
        if (model, policy) in times
    ]
    if not points:
        raise InvalidRequestError(
            "No policy was measured by both benchmarks on one model.", param="results"
        )
    return sorted(points, key=lambda point: (point.model, point.dataset, point.milliseconds))


def plot_points(points: Sequence[Point], path: Path) -> None:
    """Draw KL over the time to the first token, a panel per model and data set, with intervals and
    the frontier."""
    panels = list(dict.fromkeys((point.model, point.dataset) for point in points))
    figure = empty_figure(4.8 * len(panels), 4.2)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        own = [point for point in points if (point.model, point.dataset) == panel]
        for point in own:
            reach = [[point.kl - point.low], [point.high - point.kl]]
            axes.errorbar(point.milliseconds, point.kl, reach, marker="o", capsize=3)
            axes.annotate(
                point.policy,
                (point.milliseconds, point.kl),
                xytext=(5, 5),
                textcoords="offset points",
                fontsize=8,
                rotation=30,
            )
        best = [point for point in own if not point.is_beaten(own)]
        axes.plot(
            [point.milliseconds for point in best],
            [point.kl for point in best],
            color="0.7",
            zorder=0,
        )
        axes.set(
            xscale="log",
            xlabel="time to first token (ms)",
            ylabel="KL along full's answer (nats)",
            title=", ".join(panel),
        )
        axes.margins(x=0.25)
        axes.set_ylim(bottom=-0.01)
    save_figure(figure, path)
