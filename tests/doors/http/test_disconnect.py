"""Clients that go away free what the engine held for them."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from kvlinker.engines.embedded.engine import EmbeddedEngine
from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.serving import Served
from tests.engines.embedded.held import Held
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
WAITING = 45
ENDLESS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "ignore_eos": True,
    "max_tokens": 1500,
    "n": 2,
}


@contextmanager
def asked(
    served: Served,
    *,
    stream: bool = False,
    path: str = CHAT,
    fields: Mapping[str, Any] = ENDLESS,
    missing: int = 0,
) -> Iterator[socket.socket]:
    """A client that has sent a request, but for ``missing`` bytes of its body, and is gone behind
    the context."""
    address = urlsplit(served.url)
    body = json.dumps({**fields, "stream": True} if stream else fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(f"{head}Content-Length: {len(body) + missing}\r\n\r\n".encode() + body)
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


@pytest.mark.parametrize("path", [CHAT, "/v1/context_caches/extract?name=a.txt"])
def test_a_client_that_leaves_while_sending_is_no_error(
    faked: Served, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    caplog.set_level(logging.INFO, "kvlinker.doors.http.edge.access_log")
    with asked(faked, path=path, missing=100):
        pass
    wait_until(lambda: caplog.records)
    (line,) = caplog.records
    assert line.levelname == "INFO"
    assert f"POST {path.partition('?')[0]} - " in caplog.text


def in_the_engine(served: Served) -> int:
    load = served.llm.current_load()
    return load.running + load.waiting


def test_explanations_take_no_threads_and_end_with_their_clients(served: Served) -> None:
    """The engine is held meanwhile; more clients wait than the server has threads."""
    engine = cast(EmbeddedEngine, served.llm.engine)
    fields = {"messages": ENDLESS["messages"]}
    with Held(engine):
        with ExitStack() as clients:
            for _ in range(WAITING):
                clients.enter_context(asked(served, path="/v1/link/explain", fields=fields))
            wait_until(lambda: in_the_engine(served) == WAITING)
            assert served.get("/status").status_code == 200
            assert served.post("/tokenize", {"prompt": "Hi"}).status_code == 200
        wait_until(lambda: len(engine.scheduler._cancelled) == WAITING)
    served.wait_until_idle()


def test_shutdown_frees_the_engine(faked: Served, engine: FakeEngine) -> None:
    engine.flowing.clear()
    with faked.http.stream("POST", CHAT, json=ENDLESS | {"stream": True}) as answer:
        lines = answer.iter_lines()  # kept: the response ends with its iterator
        next(lines)
        engine.wait_until_running(2)
        faked.llm.close()
        engine.wait_until_idle()
