"""``kvlinker top``: the activity of a running server, from its status and metrics, refreshed
continuously."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from pydantic import ByteSize
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvlinker.base.errors import KVLinkerError
from kvlinker.cli.console import failures, output_console
from kvlinker.doors.client import Client, ServerUnreachableError
from kvlinker.doors.client.wire import answers_of_others

WINDOW_SECONDS = 60.0
"""The time over which a live view counts: long enough to read figures, short enough to see
changes."""

SOURCES = ("cached", "recomputed", "fresh")
SHOWN = frozenset({"model", "policy", "started_at", "requests", "kv_slots", "tiers"})
"""The fields of the status that a frame shows."""

BAR_WIDTH = 20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A server's report at one moment: the body of ``/status``, and the samples of ``/metrics`` by
    their names.

    ``seconds`` is that moment by a clock that counts from anywhere.
    """

    seconds: float
    status: Mapping[str, Any]
    samples: Mapping[str, Sequence[Sample]]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels; 0 if there are none."""
        return sum(
            s.value
            for s in self.samples.get(f"kvlinker:{name}", ())
            if labels.items() <= s.labels.items()
        )


@dataclass(frozen=True, slots=True)
class Period:
    """The changes between two snapshots of one process."""

    since: Snapshot
    until: Snapshot

    @property
    def seconds(self) -> float:
        return self.until.seconds - self.since.seconds

    def count(self, name: str, **labels: str) -> float:
        """Return by how much a counter grew."""
        return self.until.total(name, **labels) - self.since.total(name, **labels)

    def rate(self, name: str, **labels: str) -> float:
        """Return by how much a counter grew per second."""
        return self.count(name, **labels) / self.seconds if self.seconds > 0 else 0.0

    def quantile(self, share: float, name: str, **labels: str) -> float | None:
        """Return the value below which ``share`` of a histogram's observations lie; None if there
        are none.

        Within a bucket observations are taken to lie evenly, as Prometheus takes them; beyond the
        last bound, on it.
        """
        bounds = sorted(
            {s.labels["le"] for s in self.until.samples.get(f"kvlinker:{name}_bucket", ())},
            key=float,
        )
        counts = [self.count(f"{name}_bucket", le=bound, **labels) for bound in bounds]
        if not counts or counts[-1] <= 0:
            return None
        wanted = share * counts[-1]
        below, lower = 0.0, 0.0
        for bound, count in zip(map(float, bounds), counts, strict=True):
            if count >= wanted:
                return (
                    lower
                    if bound == float("inf")
                    else lower + (bound - lower) * (wanted - below) / (count - below)
                )
            below, lower = count, bound
        return lower


class History:
    """Snapshots of the last ``WINDOW_SECONDS``, of the process that runs now."""

    def __init__(self) -> None:
        self._snapshots: deque[Snapshot] = deque()

    def add(self, snapshot: Snapshot) -> Period:
        """Return the period from the window's first snapshot to this one; the first one counts from
        the server's start.

        A server that was started again begins anew, for its counters do.
        """
        snapshots = self._snapshots
        if snapshots and snapshots[0].status["started_at"] != snapshot.status["started_at"]:
            snapshots.clear()
        snapshots.append(snapshot)
        while len(snapshots) > 2 and snapshots[1].seconds <= snapshot.seconds - WINDOW_SECONDS:
            snapshots.popleft()
        return Period(snapshots[0], snapshot) if len(snapshots) > 1 else whole_life(snapshot)


def whole_life(snapshot: Snapshot) -> Period:
    """Return the period from the server's start, when every counter was 0, to a snapshot."""
    age = max(time.time() - snapshot.status["started_at"], 0.0)
    return Period(replace(snapshot, seconds=snapshot.seconds - age, samples={}), snapshot)


def read(client: Client) -> Snapshot:
    """Ask a server. Raises ServerUnreachableError, also where something else answers, and the
    errors that the server answers."""
    samples: dict[str, list[Sample]] = {}
    with answers_of_others():
        for family in text_string_to_metric_families(client.server_metrics()):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample)
    status = client.server_status()
    if missing := sorted(SHOWN - status.keys() if isinstance(status, dict) else SHOWN):
        raise ServerUnreachableError(
            f"What answers is no server of kvlinker's: its status has no {', '.join(missing)}."
            " Check the address."
        )
    return Snapshot(time.monotonic(), status, samples)


def top(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="KVLINKER_API_KEY", help="Any key that it accepts.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, counted from the server's start.")
    ] = False,
) -> None:
    """Watch a running server: requests, tokens, the time to the first token, and tiers.

    Figures are those of the last minute. Where the output is no terminal, one frame is printed, as
    with --once.
    """
    with failures(), Client(url, api_key) as client:
        if once or not sys.stdout.isatty():
            output_console().print(view(whole_life(read(client)), url))
            return
        with suppress(KeyboardInterrupt):
            _watch(client, url, every)


def _watch(client: Client, url: str, every: float) -> None:
    """Show the server until the user interrupts; one that does not answer is asked again."""
    history = History()
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            try:
                frame = view(history.add(read(client)), url)
            except KVLinkerError as error:
                frame = Text(error.message, style="red")
            live.update(frame, refresh=True)
            time.sleep(every)


def view(period: Period, url: str) -> RenderableType:
    """Return one frame: what the server is, what it did in the period, and what its tiers hold."""
    status = period.until.status
    since_start = not period.since.samples
    title = Text.assemble(
        (f"{status['model']}", "bold"),
        f"  {status['policy']}  {url}  up {_duration(time.time() - status['started_at'])}",
        (f"  figures {'since the start' if since_start else f'of {period.seconds:.0f} s'}", "dim"),
    )
    return Group(title, "", _requests(period), "", _tiers(period))


def _requests(period: Period) -> Table:
    requests, slots = period.until.status["requests"], period.until.status["kv_slots"]
    tokens = {source: period.count("prompt_tokens_total", source=source) for source in SOURCES}
    table = Table.grid(padding=(0, 2))
    counts = ", ".join(f"{requests[state]} {state}" for state in ("running", "waiting", "finished"))
    for name, value in (
        ("requests", f"{counts}: {period.rate('requests_total'):.2f}/s"),
        ("prompt tokens", f"{period.rate('prompt_tokens_total'):,.0f}/s: {_shares(tokens)}"),
        ("tokens generated", f"{period.rate('output_tokens_total'):,.1f}/s"),
        (
            "first token",
            ", ".join(
                f"p{share * 100:.0f} {_time(period.quantile(share, 'time_to_first_token_seconds'))}"
                for share in (0.5, 0.9, 0.99)
            ),
        ),
    ):
        table.add_row(Text(name, style="dim"), value)
    table.add_row(
        Text("KV slots", style="dim"), _filled(slots["used"], slots["total"], f"{slots['used']:,}")
    )
    return table


def _tiers(period: Period) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("tier")
    table.add_column("used")
    for heading in (
        "of",
        "chunks",
        "found/s",
        "load p50",
        "delivers",
        "evicted",
        "errors",
        "damaged",
    ):
        table.add_column(heading, justify="right")
    for tier in period.until.status["tiers"]:
        name, bandwidth = tier["name"], tier["bytes_per_second"]
        table.add_row(
            name,
            _filled(tier["used_bytes"], tier["budget_bytes"], _size(tier["used_bytes"])),
            _size(tier["budget_bytes"]),
            f"{tier['chunks']:,}",
            f"{period.rate('chunk_lookups_total', result='hit', tier=name):.2f}",
            _time(period.quantile(0.5, "load_seconds", tier=name)),
            "-" if bandwidth is None else f"{_size(bandwidth)}/s",
            *(
                f"{period.count(f'{event}_total', tier=name):,.0f}"
                for event in ("evictions", "tier_errors", "damaged_chunks")
            ),
        )
    table.add_row(
        "not found", "", "", "", f"{period.rate('chunk_lookups_total', result='miss'):.2f}"
    )
    return table


def _shares(counts: Mapping[str, float]) -> str:
    """Write each count as a percentage of their sum."""
    whole = sum(counts.values())
    return (
        ", ".join(f"{count / whole:.1%} {name}" for name, count in counts.items())
        if whole
        else "none"
    )


def _filled(used: float, budget: float, text: str) -> Table:
    """Draw how much of a budget is used, followed by the amount and its share."""
    row = Table.grid(padding=(0, 1))
    share = used / max(budget, 1)
    row.add_row(ProgressBar(total=1.0, completed=share, width=BAR_WIDTH), f"{text} ({share:.0%})")
    return row


def _size(nbytes: float) -> str:
    return ByteSize(int(nbytes)).human_readable()


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    return (
        f"{hours} h {minutes % 60} min"
        if hours
        else f"{minutes} min"
        if minutes
        else f"{max(int(seconds), 0)} s"
    )
