"""``kvlinker bench quality``: how good answers are, by policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvlinker.cli.bench.common import (
    MODEL_OPTIONS,
    QUALITY_OPTIONS,
    ChunkTokens,
    Json,
    Plot,
    Shape,
    Split,
    UsualPolicies,
    command_line,
    register,
    require_folders,
    show,
    usual_policies,
)
from kvlinker.cli.console import BAD_USAGE, failures, progress_bar, progress_line, warn
from kvlinker.config import Settings

SKIPS_SHOWN = 5


@register(*MODEL_OPTIONS, *QUALITY_OPTIONS)
def quality(
    settings: Settings,
    shape: Shape = None,
    policies: UsualPolicies = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="reader (the default), prose, a file of examples, or a folder to hide needles in; may be repeated.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[str, typer.Option(help="Only these tasks, with commas between.", show_default=False)] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Most examples of each data set.")] = None,
    split: Split = "semantic",
    chunk_tokens: ChunkTokens = 512,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; by default what the data set asks for.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Take passages from the middle of contexts over the window.")
    ] = False,
    deviation: Annotated[
        bool, typer.Option("--deviation", help="Measure KV and attention deviation by layer, too.")
    ] = False,
    concurrency: Annotated[
        int, typer.Option(min=1, max=64, help="Examples at once; with more than 1, rounding differs between runs.")
    ] = 1,
    codec: Annotated[str, typer.Option(help="Use chunks as a tier with this codec gives them back.")] = "raw",
    resume: Annotated[
        Path | None, typer.Option(help="Keep finished results in this file, and go on from it.", dir_okay=False)
    ] = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Quality of answers, and of predictions of given text, by policy, beside those of a full prefill."""
    from kvlinker.research.bench.plots import plot_quality
    from kvlinker.research.bench.quality import COLUMNS, QualityOptions, main_rows, run_quality
    from kvlinker.research.bench.subject import make_subject
    from kvlinker.research.evaluation.contexts import ContextSplit
    from kvlinker.store.format.codecs import find_codec

    with failures(BAD_USAGE):
        require_folders(json, plot, resume)
        options = QualityOptions(
            datasets=tuple(dataset or ("reader",)),
            tasks=tuple(task.strip() for task in tasks.split(",") if task.strip()),
            policies=tuple(usual_policies(policies, settings)),
            limit=limit,
            split=ContextSplit(split),
            chunk_tokens=chunk_tokens,
            max_tokens=max_tokens,
            truncate=truncate,
            deviation=deviation,
            concurrency=concurrency,
            codec=find_codec(codec),
            resume=resume,
        )
        with progress_line():
            subject = make_subject(settings, shape=shape, command=command_line())
        with progress_bar() as advance:
            measured = run_quality(subject, settings, options, progress=advance)
    for skip in measured.skipped[:SKIPS_SHOWN]:
        warn(f"skipped {skip.where}: {skip.reason}")
    if len(measured.skipped) > SKIPS_SHOWN:
        warn(f"skipped {len(measured.skipped)} examples in all")
    report = measured.report
    show(replace(report, rows=main_rows(report.rows)), COLUMNS, None)
    if json is not None:
        report.write_json(json)
    if plot is not None:
        with failures(BAD_USAGE):
            plot_quality(main_rows(report.rows), plot)
