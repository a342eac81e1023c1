"""Clients that go away free what the engine held for them."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast
from urllib.parse import urlsplit

import pytest

from kvlinker.engines.embedded.engine import EmbeddedEngine
from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.serving import Served
from tests.engines.embedded.held import Held
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
ENDLESS = {
    "messages": [{"role": "user", "content": "Hi"}],
    "ignore_eos": True,
    "max_tokens": 1500,
    "n": 2,
}


@contextmanager
def asked(served: Served, *, stream: bool = False) -> Iterator[socket.socket]:
    """A client that has sent a request, and is gone behind the context."""
    address = urlsplit(served.url)
    body = json.dumps(ENDLESS | {"stream": stream}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine(served: Served, stream: bool) -> None:
    """The engine is held meanwhile, so that no request ends by itself."""
    engine = cast(EmbeddedEngine, served.llm.engine)
    with Held(engine) as held:
        with asked(served, stream=stream) as client:
            held.let(10)
            assert not stream or client.recv(9) == b"HTTP/1.1 "
            load = served.llm.current_load()
            assert load.running == 2
            assert load.slots_used > 0
        wait_until(lambda: len(engine.scheduler._cancelled) == 2)
    served.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_before_the_first_token_are_noticed(
    faked: Served, engine: FakeEngine, stream: bool
) -> None:
    engine.flowing.clear()
    with asked(faked, stream=stream):
        engine.wait_until_running(2)
    engine.wait_until_idle()
    assert engine.cancelled == 2
    assert faked.get("/health").status_code == 200


def test_a_client_that_leaves_before_its_answer_begins_has_no_status(
    faked: Served, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvlinker.doors.http.edge.access_log")
    engine.flowing.clear()
    with asked(faked):
        engine.wait_until_running(2)
    engine.wait_until_idle()
    wait_until(lambda: caplog.records)
    assert f"POST {CHAT} - " in caplog.text


def test_shutdown_frees_the_engine(faked: Served, engine: FakeEngine) -> None:
    engine.flowing.clear()
    with faked.http.stream("POST", CHAT, json=ENDLESS | {"stream": True}) as answer:
        lines = answer.iter_lines()  # kept: the response ends with its iterator
        next(lines)
        engine.wait_until_running(2)
        faked.llm.close()
        engine.wait_until_idle()
