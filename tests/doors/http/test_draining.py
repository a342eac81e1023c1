"""A server that is told to stop: what it refuses, what it finishes, and how it cuts off what takes
too long. The fake engine lets each test say when a request goes on. ``test_sigterm.py`` does the
same to real processes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlinker.base.errors import EngineClosedError, KVLinkerError
from kvlinker.doors.http.app import create_app
from kvlinker.doors.http.edge.address import bind, url_of
from kvlinker.doors.http.edge.connections import EngineServer, server_config
from kvlinker.doors.http.edge.guards import Access, Drain, DrainReport, Guard
from kvlinker.doors.http.models import ServedModel
from kvlinker.engines.contract.contract import engine_closed
from kvlinker.settings import Settings
from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.serving import Served

WAIT = 20.0
HELLO = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 5},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 5},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 5},
}
"""A request of each dialect."""


@dataclass(frozen=True)
class Stopping:
    """A server that can be told to stop."""

    url: str
    drain: Drain
    thread: threading.Thread
    engine: FakeEngine

    def ended(self) -> bool:
        self.thread.join(WAIT)
        return not self.thread.is_alive()


@pytest.fixture
def stopping(faked: Served, engine: FakeEngine) -> Iterator[Callable[[float], Stopping]]:
    """Starts servers of the fake engine with these drain timeouts."""
    servers: list[tuple[EngineServer, Stopping]] = []

    def start(timeout: float) -> Stopping:
        app = create_app(
            faked.llm, faked.llm.settings.model_copy(update={"drain_timeout": timeout})
        )
        server, running = started(app, engine)
        servers.append((server, running))
        return running

    yield start
    engine.flowing.set()
    for server, running in servers:
        server.should_exit = True
        assert running.ended()


def started(app: FastAPI, engine: Any) -> tuple[EngineServer, Stopping]:
    """A server of an app whose LLM others have, too."""
    served: ServedModel = app.state.served
    listener = bind("127.0.0.1", 0)
    listener.listen()
    config = server_config(app, request_timeout=WAIT)
    config.lifespan = "off"
    server = EngineServer(config, listener, healthy=lambda: True, drain=served.drain)
    thread = threading.Thread(target=server.run, daemon=True)
    url = url_of(listener)
    thread.start()
    assert httpx.get(f"{url}/health", timeout=WAIT).json() == {"status": "ok"}
    return server, Stopping(url, served.drain, thread, engine)


def asked(
    server: Stopping, threads: ThreadPoolExecutor, path: str, *, stream: bool
) -> Future[tuple[int, httpx.Headers, str]]:
    """Status, headers and body of a request; it has reached the engine, and a stream has begun."""
    before = server.engine.current_load().running
    begun = threading.Event()

    def ask() -> tuple[int, httpx.Headers, str]:
        body = BODIES[path] | {"stream": stream}
        with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=WAIT) as answer:
            begun.set()
            return answer.status_code, answer.headers, answer.read().decode()

    answered = threads.submit(ask)
    while server.engine.current_load().running == before or (stream and not begun.is_set()):
        assert not answered.done(), answered.result()
        threading.Event().wait(0.005)
    return answered


def events_of(text: str) -> list[Any]:
    """The data of all events of a stream."""
    found = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: "))
    return [data if data == "[DONE]" else json.loads(data) for data in found]


@pytest.mark.parametrize("path", BODIES)
def test_what_runs_is_finished_while_new_requests_are_refused(
    stopping: Callable[[float], Stopping], engine: FakeEngine, path: str
) -> None:
    server = stopping(WAIT)
    engine.flowing.clear()
    with ThreadPoolExecutor() as threads, httpx.Client(base_url=server.url, timeout=WAIT) as kept:
        assert kept.get("/health").json() == {"status": "ok"}
        answers = [asked(server, threads, path, stream=stream) for stream in (False, True)]
        server.drain.begin()
        health = kept.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        assert health.headers["connection"] == "close"
        assert httpx.get(f"{server.url}/live").json() == {"status": "alive"}
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        for refused in (kept.post(path, json=BODIES[path]), kept.get("/v1/models")):
            assert refused.status_code == 503
            assert refused.headers["connection"] == "close"
            assert int(refused.headers["retry-after"]) > 0
            assert "shutting down" in refused.json()["error"]["message"]
        assert not any(answered.done() for answered in answers)
        engine.flowing.set()
        for status, _, text in (answered.result(WAIT) for answered in answers):
            assert status == 200
            assert "w4" in text
            assert "shutting down" not in text
        assert server.ended()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


@pytest.mark.whole
@pytest.mark.parametrize("path", BODIES)
def test_what_takes_too_long_ends_with_an_error_of_its_api(
    stopping: Callable[[float], Stopping],
    engine: FakeEngine,
    path: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A 503, or the last event of a stream that had begun."""
    server = stopping(0.0)
    engine.flowing.clear()
    with ThreadPoolExecutor() as threads:
        answers = [asked(server, threads, path, stream=stream) for stream in (False, True)]
        server.drain.begin()
        (status, headers, text), (streamed, _, events) = (
            answered.result(WAIT) for answered in answers
        )
    assert server.ended()
    assert (status, headers["connection"], streamed) == (503, "close", 200)
    error, told = json.loads(text)["error"], events_of(events)
    assert "shutting down" in error["message"]
    match path:
        case "/v1/messages":
            assert error["type"] == "overloaded_error"
            assert (told[-1]["type"], told[-1]["error"]) == ("error", error)
        case "/v1/responses":
            assert error["code"] == "engine_closed"
            assert told[-1]["type"] == "response.failed"
            assert told[-1]["response"]["error"]["type"] == "engine_closed"
        case _:
            assert error["code"] == "engine_closed"
            assert told[-2:] == [{"error": error}, "[DONE]"]
    assert "Traceback" not in caplog.text
    assert "0 requests were finished, 2 were cut off" in caplog.text
    engine.wait_until_idle()


async def test_a_drain_waits_for_the_last_request_and_counts() -> None:
    drain = Drain(WAIT)
    with drain.request():
        drain.begin()
        finishing = asyncio.create_task(drain.finish())
        with drain.request():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not finishing.done()
    assert await finishing == DrainReport(finished=2, cut=0)
    assert drain.ended


async def test_an_answer_that_begins_when_all_are_cut_off_fails_at_once() -> None:
    errors: list[KVLinkerError] = []

    class Failing:
        def fail(self, error: KVLinkerError) -> None:
            errors.append(error)

    drain, early, late = Drain(0.0), Failing(), Failing()
    drain.add(early)
    with drain.request() as cut:
        finishing = asyncio.create_task(drain.finish())
        await cut
        drain.add(late)
    assert await finishing == DrainReport(finished=0, cut=1)
    assert [type(error) for error in errors] == [EngineClosedError] * 2


async def test_what_does_not_end_when_it_is_cut_off_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As threads do not. What it sends later goes nowhere."""
    monkeypatch.setattr("kvlinker.doors.http.edge.guards.LAST_SECONDS", 0.0)
    sent: list[Message] = []
    goes_on, ended = asyncio.Event(), asyncio.Event()

    async def stubborn(scope: Scope, receive: Receive, send: Send) -> None:
        while not goes_on.is_set():
            try:
                await goes_on.wait()
            except asyncio.CancelledError:
                continue
        await send({"type": "http.response.start", "status": 200, "headers": []})
        ended.set()

    async def send(message: Message) -> None:
        sent.append(message)

    drain = Drain(0.0)
    answering = asyncio.create_task(
        guard(stubborn, drain)(scope_of("/v1/link/explain"), _nothing, send)
    )
    await asyncio.sleep(0)
    drain.begin()
    assert await drain.finish() == DrainReport(finished=0, cut=1)
    await answering
    goes_on.set()
    await ended.wait()
    assert [message.get("status") for message in sent] == [503, None]
    assert (b"connection", b"close") in sent[0]["headers"]


async def test_a_body_is_read_before_its_request_is_refused() -> None:
    """Or a client that is still sending finds its connection reset, and does not see the answer."""
    order: list[str] = []
    bodies = [
        {"type": "http.request", "more_body": True},
        {"type": "http.request", "more_body": False},
    ]

    async def receive() -> Message:
        order.append("read")
        return bodies.pop(0)

    async def send(message: Message) -> None:
        order.append(message["type"])

    drain = Drain(0.0)
    drain.begin()
    await guard(_never, drain)(scope_of("/v1/models"), receive, send)
    assert order == ["read", "read", "http.response.start", "http.response.body"]


def test_whoever_is_refused_is_told_when_to_come_back() -> None:
    assert engine_closed().retry_after > 0


def guard(app: ASGIApp, drain: Drain) -> Guard:
    return Guard(app, access=Access(Settings()), drain=drain, sizes={}, seconds=30)


def scope_of(path: str) -> Scope:
    state = {"request_id": "req_1"}
    return {"type": "http", "method": "GET", "path": path, "headers": [], "state": state}


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


async def _never(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("nothing is answered any more")
