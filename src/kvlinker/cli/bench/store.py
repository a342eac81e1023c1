"""``kvlinker bench``: what tiers, codecs and many chunks cost, and whether tenants can tell what others have."""

from __future__ import annotations

from typing import Annotated

import typer

from kvlinker.cli.bench.common import (
    MODEL_OPTIONS,
    ChunkTokens,
    FreshTokens,
    Json,
    Plot,
    Policies,
    Repeat,
    Shape,
    command_line,
    policy_names,
    register,
    require_folders,
    show,
)
from kvlinker.cli.console import BAD_USAGE, failures, progress_line
from kvlinker.config import Settings


@register(*MODEL_OPTIONS, "redis_url")
def store(
    settings: Settings,
    shape: Shape = None,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks per prompt.")] = 8,
    chunk_tokens: ChunkTokens = 512,
    fresh_tokens: FreshTokens = 32,
    policies: Policies = "naive,legolink-16,query-5",
    tiers: Annotated[str, typer.Option(help="disk, redis, object, with commas between.")] = "disk,object",
    codecs: Annotated[str, typer.Option(help="How tiers write chunks, with commas between.")] = "raw,int8",
    entries: Annotated[int, typer.Option(min=10, help="Chunks that a large catalog and folder have.")] = 100_000,
    cases: Annotated[str, typer.Option(help="What to measure, with commas between.")] = (
        "ttft,writing,throughput,crowd"
    ),
    repeat: Repeat = 5,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """What the store's tiers cost a request, what writes cost it, and what it costs to keep many chunks."""
    from kvlinker.research.bench.plots import plot_store
    from kvlinker.research.bench.store import COLUMNS, run_store
    from kvlinker.research.bench.subject import make_subject
    from kvlinker.research.bench.ttft import Workload
    from kvlinker.store.format.codecs import find_codec

    with failures(BAD_USAGE), progress_line() as progress:
        require_folders(json, plot)
        subject = make_subject(settings, shape=shape, command=command_line(), repeat=repeat)
        report = run_store(
            subject,
            Workload(chunks, chunk_tokens, fresh_tokens),
            policies=policy_names(policies),
            tiers=[name.strip() for name in tiers.split(",")],
            codecs=[find_codec(name.strip()).name for name in codecs.split(",")],
            entries=entries,
            cases=[name.strip() for name in cases.split(",")],
            repeat=repeat,
            redis_url=None if settings.redis_url is None else settings.redis_url.get_secret_value(),
            progress=progress,
        )
    show(report, COLUMNS, json)
    if plot is not None:
        with failures(BAD_USAGE):
            plot_store(report.rows, plot)


@register(*MODEL_OPTIONS)
def codecs(
    settings: Settings,
    shape: Shape = None,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of prose.")] = 16,
    chunk_tokens: ChunkTokens = 512,
    repeat: Repeat = 5,
    json: Json = None,
) -> None:
    """What tiers' codecs make of the KV of prose: room, error, and time on the processor."""
    from kvlinker.research.bench.codecs import COLUMNS, run_codecs
    from kvlinker.research.bench.subject import make_subject

    with failures(BAD_USAGE), progress_line() as progress:
        require_folders(json)
        subject = make_subject(settings, shape=shape, command=command_line(), repeat=repeat)
        report = run_codecs(subject, chunks=chunks, chunk_tokens=chunk_tokens, repeat=repeat, progress=progress)
    show(report, COLUMNS, json)


@register(*MODEL_OPTIONS)
def isolation(
    settings: Settings,
    shape: Shape = None,
    lookups: Annotated[int, typer.Option(min=10, help="Lookups of each kind.")] = 1000,
    json: Json = None,
) -> None:
    """Whether a tenant can tell by time what other tenants have: lookups of theirs beside lookups of nothing."""
    from kvlinker.research.bench.isolation import COLUMNS, run_isolation
    from kvlinker.research.bench.subject import make_subject

    with failures(BAD_USAGE), progress_line() as progress:
        subject = make_subject(settings, shape=shape, command=command_line(), lookups=lookups)
        report = run_isolation(subject, lookups=lookups, progress=progress)
    show(report, COLUMNS, json)
