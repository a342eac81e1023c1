"""Makes soaking a server a benchmark: its options, its table, its plot and its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvlinker.quality.bench.harness.benchmark import (
    Chunks,
    ChunkTokens,
    Policies,
    Setup,
    benchmark,
    policy_names,
)
from kvlinker.quality.bench.harness.report import (
    Report,
    Row,
    describe_machine,
    empty_figure,
    save_figure,
    versions,
)
from kvlinker_lab.load.servers import kvlinker_server, model_to_serve
from kvlinker_lab.soak.plan import SoakPlan
from kvlinker_lab.soak.run import run_soak

POLICIES = "query-5-sensitive,legolink-16,cacheblend-15,cachecraft-1,naive,full"
_PANELS = (
    ("memory_mb", "resident memory (MB)"),
    ("descriptors", "file descriptors"),
    ("threads", "threads"),
    ("disk_mb", "state directory (MB)"),
)


def plot_soak(rows: Sequence[Row], path: Path) -> None:
    """Draw what the server took over time. Raises InvalidRequestError without matplotlib, or for a
    bad file name."""
    figure = empty_figure(9, 6)
    panels = figure.subplots(2, 2, sharex=True).flat
    for axes, (column, label) in zip(panels, _PANELS, strict=True):
        axes.plot([row["minutes"] for row in rows], [row[column] for row in rows])
        axes.set(ylabel=label, ylim=(0, None))
    figure.supxlabel("minutes")
    save_figure(figure, path)


@benchmark("soak", plot=plot_soak)
def soak(
    setup: Setup,
    *,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long the traffic lasts.")] = 60.0,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two lines.")] = 60.0,
    policies: Policies = POLICIES,
    users: Annotated[int, typer.Option(min=1, help="Conversations at the same time.")] = 4,
    library: Annotated[int, typer.Option(min=1, help="Documents that questions are about.")] = 24,
    chunks: Chunks = 3,
    chunk_tokens: ChunkTokens = 128,
    aborts: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of conversations whose client leaves at any moment."
        ),
    ] = 0.1,
    uploads: Annotated[
        float, typer.Option(min=0, help="Documents per second that new ones take the place of.")
    ] = 1.0,
    audit: Annotated[str, typer.Option(help="Share of answers that the server audits.")] = "10%",
    host_memory: Annotated[
        str, typer.Option(help="The server's tier in memory: less than the chunks take.")
    ] = "8MiB",
    disk_space: Annotated[
        str, typer.Option(help="The server's tier on disk: less than the chunks take.")
    ] = "16MiB",
    growth: Annotated[
        float,
        typer.Option(min=0, help="Percent that memory, descriptors, threads and disk may grow."),
    ] = 3.0,
    restart_every: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds between two restarts of the server by SIGTERM; 0 for none."
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Another seed makes other traffic.")] = 0,
) -> Report:
    """Keep a server under mixed traffic, and check that nothing fails, grows or loses count.

    Conversations, aborts, uploads, deletions, expiry, audits and all policies at the same time;
    with --restart-every restarts, too, in which no request may be lost. The command ends with 1
    where a check fails.
    """
    from kvlinker.engines.contract.model_files import choose_device, choose_dtype

    plan = SoakPlan(
        seconds=60 * minutes,
        every=every,
        policies=policy_names(policies),
        users=users,
        library=library,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        aborts=aborts,
        uploads=uploads,
        restart_every=restart_every,
        growth=growth / 100,
        seed=seed,
    )
    device = choose_device(setup.settings.device)
    options = {"audit": audit, "host_memory": host_memory, "disk_space": disk_space}
    usual = plan.policies[0]  # not auto, which is measured in idle time with chunks of its own
    with (
        model_to_serve(setup.settings, setup.shape) as settings,
        kvlinker_server(
            settings, **options, policy=usual, max_variants=16, implicit_caches=library // 2
        ) as server,
    ):
        result = run_soak(server, plan, disk_space=disk_space, on_row=_tell)
    dtype = str(choose_dtype(setup.settings.dtype, device)).removeprefix("torch.")
    return Report(
        command=setup.command,
        machine=describe_machine(device),
        versions=versions(),
        settings={
            "model": setup.shape or settings.served_name,
            "dtype": dtype,
            "minutes": minutes,
            "policies": policies,
            "users": users,
            "library": library,
            "chunks": f"{chunks} × {chunk_tokens}",
            "aborts": aborts,
            "uploads_per_s": uploads,
            "restart_every_s": restart_every,
            **options,
            "seed": seed,
        },
        rows=result.rows,
        checks=result.checks,
    )


def _tell(row: Row) -> None:
    """Print a row at once, so that a long run that is stopped early has shown something."""
    values = (
        f"{name} {value:.1f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
    )
    typer.echo(", ".join(values), err=True)
