"""Keeps a router's view of servers up to date: polls the state and the chunks of each of them every
second."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
from anyio import CancelScope

from kvlinker.base.types.residency import KnownChunk, ResidencyReport, TierCost
from kvlinker.doors.client.wire import access_headers
from kvlinker_fleet.router import Router

MOST_PRELOADED = 1000
"""The most chunks that a server which joins brings to memory."""

PRELOAD_SECONDS = 30.0
"""The seconds that it has for that; then it gets requests in any case."""

POLL_SECONDS = 1.0
"""The seconds between two polls of a server."""

ANSWER_SECONDS = 5.0
"""The seconds after which a server that does not answer a poll gets no more requests."""

SILENT_SECONDS = 30.0
"""The seconds without an answer to any poll after which requests no longer wait for a server: in a
network partition, no connection breaks."""

UNANSWERED = (httpx.HTTPError, httpx.InvalidURL)
"""The errors of requests that got no answer; httpx raises InvalidURL for a ``Location`` that is
none."""

ReplicaState = Literal["starting", "ready", "draining", "dead"]
"""``starting``: has not answered yet, or brings chunks to memory. ``dead``: does not answer any
more, or its engine has failed."""

Find = Callable[[], Awaitable[Iterable[str]]]
"""Returns the addresses of all servers that there are now."""

logger = logging.getLogger("kvlinker.fleet.backends")


@dataclass(slots=True)
class Backend:
    """A server, as it was in its last report: ``reason`` says why it gets no requests, and is None
    if it does; ``pid`` is None until it was reported. ``role`` is the setting. A caller that holds
    one may still send it requests after it was removed."""

    id: str
    url: str
    state: ReplicaState = "starting"
    reason: str | None = "was not asked yet"
    pid: int | None = None
    role: str = "both"

    pending: int = 0
    """The chunks that it still has to bring to memory."""

    preloads_until: float = 0.0
    """When it gets requests in any case, by the monotonic clock."""

    refuses: bool = False
    """True if it does not take the router's key."""

    _silent_since: float | None = None
    _waiting: set[CancelScope] = field(default_factory=set)

    @contextmanager
    def unless_silent(self) -> Iterator[None]:
        """Run a block that waits for this server. Raises TimeoutError once it has answered no poll
        for ``SILENT_SECONDS``."""
        with CancelScope() as scope:
            self._waiting.add(scope)
            try:
                yield
            finally:
                self._waiting.discard(scope)
        if scope.cancelled_caught:
            raise TimeoutError

    @property
    def is_awaited(self) -> bool:
        """True while requests wait for it."""
        return bool(self._waiting)

    def note_poll(self, *, answered: bool) -> None:
        """Note whether it has answered a poll."""
        now = asyncio.get_running_loop().time()
        if answered:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since >= SILENT_SECONDS:
            while self._waiting:
                self._waiting.pop().cancel()


def always(urls: Iterable[str]) -> Find:
    """Return a finder of the same servers at all times."""
    known = tuple(urls)

    async def find() -> Iterable[str]:
        return known

    return find


class Backends:
    """Polls servers, and reports to the router. Belongs to one event loop."""

    def __init__(
        self, find: Find, router: Router, client: httpx.AsyncClient, api_key: str | None
    ) -> None:
        """The hosts and ports of the addresses that ``find`` returns are the replicas' ids. Each is
        asked with ``api_key``, an admin's, if they want one."""
        self._find = find
        self._router = router
        self._client = client
        self._headers = access_headers(api_key)
        self.known: dict[str, Backend] = {}
        """All servers, by their replicas' ids."""

        self.keyed = api_key is not None
        """True if the servers identify tenants by their keys."""
        self.recognises = False
        """True if the servers make chunks of passages that come again in plain texts."""
        self.body_limits: dict[str, int] = {}
        """The most bytes of bodies that any server takes, by path, as far as they report it."""
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
        """Ask one server now, if it is still known."""
        backend = self.known.get(replica)
        if backend is None:
            return
        before = backend.state
        state, reason = await self._state(backend)
        if not self._knows(backend):
            return
        backend.state, backend.reason = state, reason
        self._router.set_ready(replica, state == "ready")
        if state != before:
            logger.info("Replica %s: %s", replica, reason or "ready")

    def ready(self) -> list[Backend]:
        """Return the servers that get requests."""
        return [each for each in self.known.values() if self._router.replicas[each.id].ready]

    def missing(self) -> str | None:
        """Return why no question can be answered now; None if one can."""
        roles = {each.role for each in self.ready()}
        if roles == {"build"}:
            return "all replicas that are ready are builders"
        return None if roles else "no replica is ready"

    async def ask_as(
        self, key: Mapping[str, str], backend: Backend, path: str
    ) -> httpx.Response | None:
        """Return a server's answer to a caller with these headers; None if there is none."""
        try:
            return await self._client.get(backend.url + path, headers=key, timeout=ANSWER_SECONDS)
        except UNANSWERED:
            return None

    async def text(self, backend: Backend, path: str) -> str:
        """Return a server's answer at a path; nothing if it does not."""
        with suppress(*UNANSWERED):
            answer = await self._get(backend, path)
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
        new = [Backend(name, url) for name, url in found.items() if name not in self.known]
        for backend in new:
            self.known[backend.id] = backend
            self._router.add(backend.id)
        await asyncio.gather(*(self.ask(backend.id) for backend in new))
        for backend in new:
            self._begin(self._follow(backend))

    async def _follow(self, backend: Backend) -> None:
        """Ask a server until it is neither found any more nor answers, and no request waits for it:
        polls say when requests are given up."""
        while (
            backend.id in self._found
            or backend.state in ("ready", "draining")
            or backend.is_awaited
        ):
            await asyncio.sleep(POLL_SECONDS)
            await self.ask(backend.id)
        del self.known[backend.id]
        self._router.remove(backend.id)
        logger.info("Replica %s: is gone", backend.id)

    def _knows(self, backend: Backend) -> bool:
        return self.known.get(backend.id) is backend

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _state(self, backend: Backend) -> tuple[ReplicaState, str | None]:
        """Return how a server is, and why it is to get no requests. A server that reports its
        health but not its chunks gets them by load alone."""
        self._router.note_poll(backend.id)
        gone: ReplicaState = "starting" if backend.state == "starting" else "dead"
        try:
            health = await self._get(backend, "/health")
        except UNANSWERED as error:
            backend.note_poll(answered=False)
            return gone, f"does not answer ({type(error).__name__})"
        backend.note_poll(answered=True)
        if health.status_code != httpx.codes.OK:
            state = "draining" if b'"draining"' in health.content else gone
            return state, f"not ready (HTTP {health.status_code})"
        if not self._knows(backend):  # it was removed meanwhile
            return "dead", "is gone"
        view = self._router.replicas[backend.id]
        known = view.epoch
        asked: dict[str, str | int] = {}
        if known is not None:
            asked = {"epoch": known, "after": view.report_number}
        try:
            if not self._take(backend, await self._get(backend, "/v1/residency", asked)):
                self._take(backend, await self._get(backend, "/v1/residency"))
            if view.epoch != known:
                await self._preload(backend)
        except Exception as error:  # whatever it answers: it is used by load alone
            logger.debug("Replica %s does not report its chunks: %r", backend.id, error)
        if backend.pending and time.monotonic() < backend.preloads_until:
            return "starting", f"reads {backend.pending} chunks into memory"
        return "ready", None

    async def _preload(self, backend: Backend) -> None:
        """Ask a server that joins, or was restarted, to read the most wanted chunks into memory.
        Where no other server is ready, requests need it at once, and it is not asked."""
        hottest = self._router.hottest(MOST_PRELOADED)
        others = (each for each in self._router.replicas.values() if each.id != backend.id)
        if backend.role == "build" or not hottest or not any(each.ready for each in others):
            return
        answer = await self._client.post(
            backend.url + "/v1/residency/preload",
            json={"chunks": hottest, "seconds": PRELOAD_SECONDS},
            headers=self._headers,
            timeout=ANSWER_SECONDS,
        )
        if answer.is_success:
            backend.pending = int(answer.json()["pending"])
            backend.preloads_until = time.monotonic() + PRELOAD_SECONDS

    def _take(self, backend: Backend, answer: httpx.Response) -> bool:
        """Hand a report to the router; returns False if the whole has to be asked for."""
        refuses = answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
        if refuses and not backend.refuses:
            logger.warning(
                "Replica %s does not tell what it has in memory, and is used by load alone: it"
                " wants an admin's key (--api-key).",
                backend.id,
            )
        backend.refuses = refuses
        if answer.status_code != httpx.codes.OK:
            return True
        fields: dict[str, Any] = answer.json()
        report = ResidencyReport(
            str(fields["epoch"]),
            int(fields["number"]),
            bool(fields["whole"]),
            {
                key: KnownChunk(tuple(chunk["tiers"]), tuple(map(str, chunk["names"])))
                for key, chunk in fields["chunks"].items()
            },
            tuple(fields["gone"]),
        )
        seconds = fields["seconds_per_token"]
        self.keyed, self.recognises = bool(fields["keyed"]), bool(fields["recognises"])
        backend.pid, backend.role = int(fields["pid"]), str(fields["role"])
        backend.pending = int(fields["pending"])
        for path, limit in fields["body_limits"].items():
            self.body_limits[path] = max(int(limit), self.body_limits.get(path, 0))
        if not self._knows(backend):
            return True
        return self._router.report(
            backend.id,
            report,
            running=int(fields["running"]),
            waiting=int(fields["waiting"]),
            seconds_per_token=None if seconds is None else float(seconds),
            tiers={name: TierCost(**cost) for name, cost in fields["tiers"].items()},
        )

    async def _get(
        self, backend: Backend, path: str, params: Mapping[str, str | int] | None = None
    ) -> httpx.Response:
        return await self._client.get(
            backend.url + path,
            params=params,
            headers=self._headers,
            timeout=ANSWER_SECONDS,
        )
