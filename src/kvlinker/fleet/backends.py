"""Keeps a router's view of servers up to date: asks each of them every second how it is and what it
has in memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from kvlinker.base.types.residency import KnownChunk, ResidencyReport, TierCost
from kvlinker.fleet.router import Router

MOST_PRELOADED = 1000
"""The most chunks that a server which joins brings to memory."""

PRELOAD_SECONDS = 30.0
"""The seconds that it has for that; then it gets requests in any case."""

POLL_SECONDS = 1.0
ANSWER_SECONDS = 5.0
"""The seconds after which a server that does not answer a poll gets no more requests."""

ReplicaState = Literal["starting", "ready", "draining", "dead"]
"""``starting``: has not answered yet, or brings chunks to memory. ``dead``: does not answer any
more, or its engine has failed."""

Find = Callable[[], Awaitable[Iterable[str]]]
"""Returns the addresses of all servers that there are now."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Seen:
    """How a server was when it was last asked: ``reason`` tells why it gets no requests, and is
    None where it does; ``pid`` is None until it has told it. ``role`` is the setting."""

    state: ReplicaState = "starting"
    reason: str | None = "was not asked yet"
    pid: int | None = None
    role: str = "both"

    pending: int = 0
    """The chunks that it still has to bring to memory."""

    preloads_until: float = 0.0
    """When it gets requests in any case, by the monotonic clock."""


def always(urls: Iterable[str]) -> Find:
    """Return what finds the same servers at all times."""
    known = tuple(urls)

    async def find() -> Iterable[str]:
        return known

    return find


class Backends:
    """Asks servers, and tells the router. Belongs to one event loop."""

    def __init__(
        self, find: Find, router: Router, client: httpx.AsyncClient, api_key: str | None
    ) -> None:
        """The hosts and ports of the addresses that ``find`` returns are the replicas' ids. Each is
        asked with ``api_key``, an admin's, if they want one."""
        self._find = find
        self._router = router
        self._client = client
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.urls: dict[str, str] = {}
        """The address of each replica."""

        self.keyed = api_key is not None
        """True if the servers tell tenants by their keys."""
        self.recognises = False
        """True if the servers make chunks of passages that come again in plain texts."""
        self.seen: dict[str, Seen] = {}
        """How each replica was when it was last asked."""

        self._found: set[str] = set()
        self._last_error = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Find all servers and ask them once, and then every second until ``stop``."""
        await self._look()
        self._begin(self._look_forever())

    async def stop(self) -> None:
        """Ask no more."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def ask(self, replica: str) -> None:
        """Ask one server now."""
        if replica not in self.urls:
            return
        before = self.seen[replica]
        state, reason = await self._state(replica)
        if replica not in self.urls:
            return
        now = self.seen[replica] = replace(self.seen[replica], state=state, reason=reason)
        self._router.set_ready(replica, state == "ready")
        if now.state != before.state:
            logger.info("Replica %s: %s", replica, reason or "ready")

    async def ask_as(
        self, key: Mapping[str, str], replica: str, path: str
    ) -> httpx.Response | None:
        """Return a server's answer to a caller who brings these headers; None where there is
        none."""
        try:
            return await self._client.get(
                self.urls[replica] + path, headers=key, timeout=ANSWER_SECONDS
            )
        except httpx.HTTPError:
            return None

    async def text(self, replica: str, path: str) -> str:
        """Return what a server answers at a path; nothing where it does not."""
        with suppress(httpx.HTTPError):
            answer = await self._get(replica, path)
            if answer.status_code == httpx.codes.OK:
                return answer.text
        return ""

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self._look()

    async def _look(self) -> None:
        """Find servers, and begin to ask the new ones."""
        try:
            found = {urlsplit(url).netloc: url.rstrip("/") for url in await self._find()}
        except Exception as error:  # whatever finds them: those that are known go on
            if repr(error) != self._last_error:
                self._last_error = repr(error)
                logger.warning("Replicas cannot be found for now: %r", error)
            return
        self._last_error = ""
        self._found = set(found)
        new = {replica: url for replica, url in found.items() if replica not in self.urls}
        for replica, url in new.items():
            self.urls[replica] = url
            self.seen[replica] = Seen()
            self._router.add(replica)
        await asyncio.gather(*map(self.ask, new))
        for replica in new:
            self._begin(self._follow(replica))

    async def _follow(self, replica: str) -> None:
        """Ask a server until it is neither found any more nor answers."""
        while replica in self._found or self.seen[replica].state in ("ready", "draining"):
            await asyncio.sleep(POLL_SECONDS)
            await self.ask(replica)
        del self.urls[replica], self.seen[replica]
        self._router.remove(replica)
        logger.info("Replica %s: is gone", replica)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _state(self, replica: str) -> tuple[ReplicaState, str | None]:
        """Return how a server is, and why it is to get no requests. One that tells its health but
        not what it has in memory gets them by load alone."""
        self._router.asked(replica)
        gone: ReplicaState = "starting" if self.seen[replica].state == "starting" else "dead"
        try:
            health = await self._get(replica, "/health")
        except httpx.HTTPError as error:
            return gone, f"does not answer ({type(error).__name__})"
        if health.status_code != httpx.codes.OK:
            state = "draining" if b'"draining"' in health.content else gone
            return state, f"not ready (HTTP {health.status_code})"
        if replica not in self.urls:  # it was removed meanwhile
            return "dead", "is gone"
        view = self._router.replicas[replica]
        known = view.epoch
        asked: dict[str, str | int] = {}
        if known is not None:
            asked = {"epoch": known, "after": view.report_number}
        try:
            if not self._take(replica, await self._get(replica, "/v1/residency", asked)):
                self._take(replica, await self._get(replica, "/v1/residency"))
            if view.epoch != known:
                await self._preload(replica)
        except (httpx.HTTPError, LookupError, TypeError, ValueError, AttributeError) as error:
            logger.debug("Replica %s does not tell what it has: %r", replica, error)
        seen = self.seen[replica]
        if seen.pending and time.monotonic() < seen.preloads_until:
            return "starting", f"brings {seen.pending} chunks to memory"
        return "ready", None

    async def _preload(self, replica: str) -> None:
        """Have a server that joins, or was restarted, bring to memory what is wanted most; unless
        no other is ready: then it is needed at once."""
        hottest = self._router.hottest(MOST_PRELOADED)
        others = (each for each in self._router.replicas.values() if each.id != replica)
        builds = self.seen[replica].role == "build"
        if builds or not hottest or not any(each.ready for each in others):
            return
        answer = await self._client.post(
            self.urls[replica] + "/v1/residency/preload",
            json={"chunks": hottest, "seconds": PRELOAD_SECONDS},
            headers=self._headers,
            timeout=ANSWER_SECONDS,
        )
        if answer.is_success:
            pending, until = int(answer.json()["pending"]), time.monotonic() + PRELOAD_SECONDS
            self.seen[replica] = replace(self.seen[replica], pending=pending, preloads_until=until)

    def _take(self, replica: str, answer: httpx.Response) -> bool:
        """Hand a report to the router; returns False where the whole has to be asked for."""
        if answer.status_code != httpx.codes.OK:
            return True
        told: dict[str, Any] = answer.json()
        report = ResidencyReport(
            str(told["epoch"]),
            int(told["number"]),
            bool(told["whole"]),
            {
                key: KnownChunk(tuple(chunk["tiers"]), tuple(map(str, chunk["names"])))
                for key, chunk in told["chunks"].items()
            },
            tuple(told["gone"]),
        )
        seconds = told["seconds_per_token"]
        self.keyed, self.recognises = bool(told["keyed"]), bool(told["recognises"])
        self.seen[replica] = replace(
            self.seen[replica],
            pid=int(told["pid"]),
            role=str(told["role"]),
            pending=int(told["pending"]),
        )
        return self._router.report(
            replica,
            report,
            running=int(told["running"]),
            waiting=int(told["waiting"]),
            seconds_per_token=None if seconds is None else float(seconds),
            tiers={name: TierCost(**cost) for name, cost in told["tiers"].items()},
        )

    async def _get(
        self, replica: str, path: str, params: Mapping[str, str | int] | None = None
    ) -> httpx.Response:
        return await self._client.get(
            self.urls[replica] + path,
            params=params,
            headers=self._headers,
            timeout=ANSWER_SECONDS,
        )
