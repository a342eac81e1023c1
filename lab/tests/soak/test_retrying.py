"""Clients of a server that is restarted send again what it refused, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest

from kvlinker.base.errors import EngineClosedError
from kvlinker.doors.client import ServerUnreachableError
from kvlinker_lab.soak import retrying
from kvlinker_lab.soak.retrying import CONNECT_SECONDS, RetryingTransport, retry

REFUSED = httpx.ConnectError("refused")
BROKEN = httpx.ReadError("broken")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that are made, which take no time."""
    made: list[float] = []

    async def sleep(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr(retrying, "sleep", sleep)
    return made


@pytest.fixture
async def transport() -> AsyncIterator[RetryingTransport]:
    async with RetryingTransport() as made:
        yield made


def answering(monkeypatch: pytest.MonkeyPatch, *outcomes: httpx.Response | Exception) -> None:
    """Let requests end like this, one after another."""
    left = list(outcomes)

    async def answer(_: object, request: httpx.Request) -> httpx.Response:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", answer)


async def test_what_is_refused_is_sent_again_when_the_server_says(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float], transport: RetryingTransport
) -> None:
    answering(
        monkeypatch, httpx.Response(503, headers={"Retry-After": "5"}), REFUSED, httpx.Response(200)
    )
    assert (
        await transport.handle_async_request(httpx.Request("GET", "http://server/"))
    ).status_code == 200
    assert pauses == [5.0, CONNECT_SECONDS]
    assert transport.refused == 2


async def test_what_was_accepted_is_never_sent_again(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float], transport: RetryingTransport
) -> None:
    answering(
        monkeypatch, BROKEN, httpx.Response(503), httpx.Response(429, headers={"Retry-After": "5"})
    )
    request = httpx.Request("GET", "http://server/")
    with pytest.raises(httpx.ReadError):
        await transport.handle_async_request(request)
    assert [(await transport.handle_async_request(request)).status_code for _ in range(2)] == [
        503,
        429,
    ]
    assert (pauses, transport.refused) == ([], 0)


def acting(*outcomes: Exception | None) -> Callable[[], Awaitable[None]]:
    """Something that ends like this, one time after another."""
    left = list(outcomes)

    async def act() -> None:
        if (outcome := left.pop(0)) is not None:
            raise outcome

    return act


def unreachable(cause: Exception) -> ServerUnreachableError:
    error = ServerUnreachableError("The server cannot be reached.")
    error.__cause__ = cause
    return error


async def test_acts_are_repeated_while_they_are_refused(pauses: list[float]) -> None:
    act = acting(EngineClosedError("closed"), unreachable(REFUSED), unreachable(BROKEN), None)
    assert await retry(act) == 2
    assert pauses == [EngineClosedError.retry_after, CONNECT_SECONDS]


async def test_acts_whose_connection_breaks_twice_have_failed(pauses: list[float]) -> None:
    with pytest.raises(ServerUnreachableError):
        await retry(acting(unreachable(BROKEN), unreachable(BROKEN)))
    assert pauses == []
