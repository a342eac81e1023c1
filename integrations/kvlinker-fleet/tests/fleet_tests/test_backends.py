"""What a router asks of servers, where servers come and go meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import httpx
import pytest
from tests.waiting import PATIENCE

from kvlinker_fleet import backends
from kvlinker_fleet.backends import Backends
from kvlinker_fleet.router import Router

Answer = Callable[[httpx.Request], Coroutine[None, None, httpx.Response]]
Check = Callable[[Backends, Router, list[str]], Coroutine[Any, Any, None]]
REPORT = {
    "epoch": "e", "number": 1, "whole": True, "chunks": {}, "gone": [], "running": 0, "waiting": 0,
    "seconds_per_token": None, "tiers": {}, "keyed": False, "recognises": False, "pid": 1,
    "role": "both", "pending": 0, "body_limits": {},
}  # fmt: skip


def run(answer: Answer, check: Check) -> None:
    """Run a check on what asks one server, which is found as long as it is in the list."""

    async def checked() -> None:
        found = ["http://one:1"]

        async def find() -> list[str]:
            return list(found)

        router = Router()
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            asked = Backends(find, router, client, None)
            await asked.start()
            try:
                await check(asked, router, found)
            finally:
                await asked.stop()

    asyncio.run(asyncio.wait_for(checked(), PATIENCE))


async def until_forgotten(asked: Backends) -> None:
    while asked.known:
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "POLL_SECONDS", 0.0)


def test_a_server_may_be_forgotten_before_it_is_asked() -> None:
    up = True

    async def answer(request: httpx.Request) -> httpx.Response:
        if not up:
            raise httpx.ConnectError("gone")
        return httpx.Response(200, content=json.dumps(REPORT))

    async def check(asked: Backends, router: Router, found: list[str]) -> None:
        nonlocal up
        (backend,) = asked.ready()
        assert backend.pid == 1
        assert await asked.text(backend, "/status") == json.dumps(REPORT)
        up = False
        found.clear()
        await until_forgotten(asked)
        assert not router.replicas
        assert await asked.text(backend, "/status") == ""
        assert await asked.ask_as({}, backend, "/v1/audit") is None
        await asked.ask(backend.id)

    run(answer, check)


def test_requests_are_given_up_where_a_silent_server_is_not_found_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "SILENT_SECONDS", 0.05)
    up = True

    async def answer(request: httpx.Request) -> httpx.Response:
        if not up:
            raise httpx.ReadTimeout("silent")
        return httpx.Response(200, content=json.dumps(REPORT))

    async def check(asked: Backends, router: Router, found: list[str]) -> None:
        nonlocal up
        (backend,) = asked.ready()
        up = False
        found.clear()
        with pytest.raises(TimeoutError), backend.unless_silent():
            await asyncio.Event().wait()
        await until_forgotten(asked)

    run(answer, check)


def test_a_server_is_asked_again_after_an_answer_that_cannot_be_read() -> None:
    """As of a login page before it."""
    well, polls = False, 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal polls
        polls += 1
        if well:
            return httpx.Response(200, content=json.dumps(REPORT))
        return httpx.Response(302, headers={"location": "http:login"})

    async def check(asked: Backends, router: Router, found: list[str]) -> None:
        nonlocal well
        (backend,) = asked.known.values()
        assert (backend.reason, asked.ready()) == ("does not answer (InvalidURL)", [])
        assert await asked.text(backend, "/status") == ""
        assert await asked.ask_as({}, backend, "/v1/audit") is None
        before = polls
        while polls < before + 3:
            await asyncio.sleep(0)
        well = True
        while not asked.ready():
            await asyncio.sleep(0)

    run(answer, check)


def test_a_server_may_be_forgotten_while_it_is_asked() -> None:
    """What it tells then changes nothing."""
    up, slow = True, ContextVar("slow", default=False)
    asked_slowly, go_on = asyncio.Event(), asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        if slow.get():
            asked_slowly.set()
            await go_on.wait()
        elif not up:
            raise httpx.ConnectError("gone")
        return httpx.Response(200, content=json.dumps(REPORT))

    async def check(asked: Backends, router: Router, found: list[str]) -> None:
        nonlocal up

        async def ask() -> None:
            slow.set(True)
            await asked.ask("one:1")

        asking = asyncio.create_task(ask())
        await asked_slowly.wait()
        up = False
        found.clear()
        await until_forgotten(asked)
        go_on.set()
        await asking
        assert not asked.known
        assert not router.replicas

    run(answer, check)


@pytest.mark.parametrize("report", [{**REPORT, "number": 1e999}, {"epoch": 1}, [], "nonsense"])
def test_a_server_that_reports_nonsense_is_used_by_load(report: object) -> None:
    """It is still asked again and again."""
    polls = 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal polls
        polls += request.url.path == "/health"
        return httpx.Response(200, content=json.dumps(report))

    async def check(asked: Backends, router: Router, found: list[str]) -> None:
        while polls < 3:
            await asyncio.sleep(0)
        assert [backend.state for backend in asked.ready()] == ["ready"]

    run(answer, check)


def test_a_key_that_is_no_admins_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    polls = 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal polls
        polls += 1
        return httpx.Response(200 if request.url.path == "/health" else 403)

    async def check(asked: Backends, router: Router, found: list[str]) -> None:
        while polls < 10:
            await asyncio.sleep(0)
        assert asked.ready()

    run(answer, check)
    told = [message for message in caplog.messages if "wants an admin's key" in message]
    assert len(told) == 1
