"""Soaks one server: mixed traffic with samples on the way, then calm, then the deletion of
everything."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvlinker.doors.client import AsyncClient
from kvlinker.quality.bench.harness.report import ReportCheck, Row
from kvlinker_lab.load.endpoint import Endpoint
from kvlinker_lab.load.servers import COMMAND, Server
from kvlinker_lab.soak import checks
from kvlinker_lab.soak.clients import Clients
from kvlinker_lab.soak.library import Library
from kvlinker_lab.soak.plan import SoakPlan
from kvlinker_lab.soak.readings import Figures, ResourceUsage, file_sizes
from kvlinker_lab.soak.retrying import RetryingTransport

QUIET_SECONDS = 300.0
"""The longest wait for audits, writers and deletions to end."""
_CALM_CONVERSATIONS = 4
"""Conversations of each user in which nothing else happens."""
_POLL_SECONDS = 0.2
"""The seconds between two looks whether the server is quiet."""

_SLACK: Mapping[str, float] = {"memory_mb": 16.0, "descriptors": 12, "threads": 12, "disk_mb": 8.0}
"""The growth that says nothing, by the column of the rows: pools of threads and connections follow
the load."""


@dataclass(frozen=True, slots=True)
class SoakResult:
    """Holds the samples that were taken on the way as rows, and the checks of the end."""

    rows: list[Row] = field(default_factory=list)
    checks: list[ReportCheck] = field(default_factory=list)


def run_soak(
    server: Server,
    plan: SoakPlan,
    *,
    disk_space: str,
    on_row: Callable[[Row], None] = lambda _: None,
) -> SoakResult:
    """Soak a server of this machine, which has no other clients. ``on_row`` gets each row at once.
    ``disk_space`` is the server's setting, for the check of its state directory.

    Raises ServerFailedError where the server does not answer.
    """
    endpoint = Endpoint.find(server.url)
    characters = endpoint.characters_per_token()
    return asyncio.run(_soak(server, endpoint, plan, characters, disk_space, on_row))


async def _soak(
    server: Server,
    endpoint: Endpoint,
    plan: SoakPlan,
    characters: float,
    disk_space: str,
    on_row: Callable[[Row], None],
) -> SoakResult:
    transport = RetryingTransport()
    async with (
        AsyncClient(endpoint.url) as client,
        httpx.AsyncClient(base_url=endpoint.url, timeout=None, transport=transport) as http,
    ):
        library = Library(
            client, plan.library, round(plan.chunk_tokens * characters), seed=plan.seed
        )
        clients = Clients(endpoint, http, client, library, plan, characters_per_token=characters)
        soak = _Soak(server, client, clients, transport, library, plan, disk_space, on_row)
        await library.fill()
        return await soak.run()


@dataclass(frozen=True, slots=True)
class _Soak:
    """Soaks a server whose library is filled."""

    server: Server
    client: AsyncClient
    clients: Clients
    transport: RetryingTransport
    library: Library
    plan: SoakPlan
    disk_space: str
    on_row: Callable[[Row], None]
    result: SoakResult = field(default_factory=SoakResult)
    statuses: list[int] = field(default_factory=list)
    """The exit statuses of restarted servers."""
    up: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by each task that needs a running server, and during a restart."""

    async def run(self) -> SoakResult:
        """Send the traffic, and judge the readings."""
        begin = await self._figures()
        over = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as tasks:
                sampling = tasks.create_task(self._sample_forever())
                tasks.create_task(self._restart_until(over))
                await self.clients.send_mixed(self.plan.seconds)
                over.set()
                sampling.cancel()
        except ExceptionGroup as failed:  # the first of them has ended the others
            raise failed.exceptions[0] from None
        mixed = await self._quiet_figures()
        calm = await self.clients.send_calm(_CALM_CONVERSATIONS * self.plan.users)
        end = await self._quiet_figures()
        tally = self.clients.tally
        found = self.result.checks
        found += [
            checks.check_growth(
                column,
                [row[column] for row in self.result.rows],
                growth=self.plan.growth,
                slack=slack,
            )
            for column, slack in _SLACK.items()
        ]
        found.append(checks.check_answers(tally))
        if self.plan.restart_every:
            found.append(checks.check_restarts(tally, self.statuses, self._refusals))
        else:  # a server counts from its start on
            found.append(checks.check_request_counts(tally, begin, mixed))
        found.append(checks.check_token_counts(calm, mixed, end))
        found.append(checks.check_idle_server(end))
        found.append(checks.check_audit(end))
        found.append(await self._wait_for_check(self._disk_indexed))
        found.append(await asyncio.to_thread(self._state_checked))
        await self.library.clear()
        found.append(await self._wait_for_check(self._nothing_kept))
        if self.server.log is not None:
            found.append(
                checks.check_log(self.server.log.read_text(encoding="utf-8", errors="replace"))
            )
        return self.result

    @property
    def _refusals(self) -> int:
        return self.transport.refused + self.clients.tally.refused

    async def _restart_until(self, over: asyncio.Event) -> None:
        """Restart the server every ``plan.restart_every`` seconds, until ``over``."""
        while self.plan.restart_every and not over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), self.plan.restart_every)
            if not over.is_set():
                async with self.up:
                    self.statuses.append(await asyncio.to_thread(self.server.restart))

    async def _sample_forever(self) -> None:
        """Add a row every ``plan.every`` seconds."""
        clock = asyncio.get_running_loop().time
        begin = clock()
        while True:
            await asyncio.sleep(begin + (len(self.result.rows) + 1) * self.plan.every - clock())
            async with self.up:
                row = await self._row(clock() - begin)
            self.result.rows.append(row)
            self.on_row(row)

    async def _row(self, seconds: float) -> dict[str, Any]:
        taken = await asyncio.to_thread(ResourceUsage.by, self.server)
        figures = await self._figures()
        tally = self.clients.tally
        return {
            "minutes": seconds / 60,
            "memory_mb": taken.memory_bytes / 1e6,
            "descriptors": taken.descriptors,
            "threads": taken.threads,
            "disk_mb": taken.disk_bytes / 1e6,
            "chunks": figures.total("store_chunks", tier="disk"),
            "complete": tally.complete,
            "aborted": tally.aborted,
            "not_found": tally.not_found,
            "failed": tally.failures.total(),
            "restarts": len(self.statuses),
            "refused": self._refusals,
            "cut": tally.cut,
            "lost": tally.lost,
            "replaced": tally.replaced,
            "evicted": figures.total("evictions_total"),
            "audited": figures.total("audit_samples_total"),
        }

    async def _figures(self) -> Figures:
        return Figures.read(await self.client.server_metrics())

    async def _quiet_figures(self) -> Figures:
        """Return the figures once the server has nothing to do, or ``QUIET_SECONDS`` are over."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + QUIET_SECONDS
        while (figures := await self._figures()).busy and clock() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        return figures

    async def _wait_for_check(self, check: Callable[[], Any]) -> ReportCheck:
        """Return a check once it passes, or once ``QUIET_SECONDS`` are over: writers and deletions
        may be under way."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + QUIET_SECONDS
        while True:
            found: ReportCheck = await check()
            if found.passed or clock() >= deadline:
                return found
            await asyncio.sleep(_POLL_SECONDS)

    async def _disk_indexed(self) -> ReportCheck:
        return checks.check_disk_index(await self._figures(), self._chunk_files())

    async def _nothing_kept(self) -> ReportCheck:
        caches = (await self.client.caches_usage())["caches"]
        return checks.check_deletions(caches, await self._figures(), len(self._chunk_files()))

    def _chunk_files(self) -> list[int]:
        """Return the sizes of all chunk files in bytes. Those of prefixes lie beside them."""
        assert self.server.state_dir is not None
        folders = (self.server.state_dir / "chunks").glob("[0-9a-f][0-9a-f]")
        return [size for folder in folders for size in file_sizes(folder, "*.safetensors")]

    def _state_checked(self) -> ReportCheck:
        """Check the state directory by ``kvlinker caches check``."""
        command = [
            *COMMAND,
            "caches",
            "check",
            f"--state-dir={self.server.state_dir}",
            f"--disk-space={self.disk_space}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = "; ".join((done.stdout + done.stderr).strip().splitlines())
        return ReportCheck("kvlinker caches check", done.returncode == 0, said)
