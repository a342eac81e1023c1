"""Makes the store's measurements a benchmark: its options, its table and its plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvlinker.quality.bench.harness.benchmark import (
    Chunks,
    ChunkTokens,
    FreshTokens,
    Policies,
    Repeat,
    Setup,
    benchmark,
    names,
    policy_names,
)
from kvlinker.quality.bench.harness.measurement import Workload
from kvlinker.quality.bench.harness.report import Report, Row, empty_figure, save_figure


def plot_store(rows: Sequence[Row], path: Path) -> None:
    """Draw the time to first token by tier, codec and policy, beside the host tier's.

    Raises InvalidRequestError without matplotlib, and for a file name whose ending it does not
    know.
    """
    shown = [row for row in rows if row["ratio_to_host"] is not None and row["policy"]]
    policies = list(dict.fromkeys(row["policy"] for row in shown))
    figure = empty_figure(8, 1 + 0.28 * len(shown))
    panels = figure.subplots(len(policies), 1, squeeze=False).flatten()
    for axes, policy in zip(panels, policies, strict=True):
        bars_of = [row for row in shown if row["policy"] == policy]
        labels = [
            " ".join(filter(None, (row["tier"], row["codec"], row["case"]))) for row in bars_of
        ]
        bars = axes.barh(labels, [row["ms"] for row in bars_of])
        axes.bar_label(bars, [f"{row['ratio_to_host']:.2f}×" for row in bars_of], padding=3)
        axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.set(title=policy)
    panels[-1].set(xlabel="ms")
    save_figure(figure, path)


@benchmark("store", plot=plot_store, settings=("redis_url",))
def store(
    setup: Setup,
    *,
    chunks: Chunks = 8,
    chunk_tokens: ChunkTokens = 512,
    fresh_tokens: FreshTokens = 32,
    policies: Policies = "naive,legolink-16,query-5",
    tiers: Annotated[
        str, typer.Option(help="disk, redis, object, with commas between.")
    ] = "disk,object",
    codecs: Annotated[
        str, typer.Option(help="How tiers write chunks, with commas between.")
    ] = "raw,int8",
    entries: Annotated[
        int, typer.Option(min=10, help="Chunks that a large catalog and folder have.")
    ] = 100_000,
    cases: Annotated[
        str, typer.Option(help="What to measure, with commas between.")
    ] = "ttft,writing,throughput,crowd",
    repeat: Repeat = 5,
) -> Report:
    """Measure what the store's tiers cost a request, what writes cost it, and what it costs to keep
    many chunks."""
    from kvlinker.store.format.codecs import find_codec
    from kvlinker_lab.store.cases import run_store
    from kvlinker_lab.store.rows import COLUMNS

    named = policy_names(policies)
    written = [find_codec(name).name for name in names(codecs)]
    url = setup.settings.redis_url
    report = run_store(
        setup.subject(repeat=repeat),
        Workload(chunks, chunk_tokens, fresh_tokens),
        policies=named,
        tiers=names(tiers),
        codecs=written,
        entries=entries,
        cases=names(cases),
        repeat=repeat,
        redis_url=None if url is None else url.get_secret_value(),
        progress=setup.progress,
    )
    return replace(report, columns=COLUMNS)
