"""Clients that send half of a request are let go; those that send slowly, but well, are not."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from kvlinker.doors.http.edge import connections
from kvlinker.doors.http.edge.address import bind, url_of
from kvlinker.doors.http.edge.connections import EngineServer, server_config
from kvlinker.doors.http.edge.guards import Drain
from tests.doors.http.serving import Served, serving

HEAD = (
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
    b" application/json\r\nContent-Length: 13\r\n"
)
BODY = b'{"text": "a"}'
WAIT = 20.0
"""Seconds after which a connection counts as never closed."""


@pytest.fixture(scope="module")
def impatient(served: Served) -> Iterator[Served]:
    """The same LLM behind a server that waits for a quarter of a second."""
    settings = served.llm.settings.model_copy(update={"request_timeout": 0.25})
    with serving(served.llm, settings, closes=False) as running:
        yield running


@pytest.fixture
def client(impatient: Served) -> Iterator[socket.socket]:
    address = urlsplit(impatient.url)
    with socket.create_connection((address.hostname, address.port), timeout=WAIT) as connected:
        yield connected


def received(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("sent", [b"", b"G", HEAD, HEAD[:-2]])
def test_half_sent_headers_are_closed(client: socket.socket, sent: bytes) -> None:
    client.sendall(sent)
    assert received(client) == b""


def test_headers_that_drip_are_closed(client: socket.socket) -> None:
    """Every byte resets the server's own timeout of idle connections."""
    client.settimeout(0.02)
    assert 3 < bytes_until_closed(client) < 1000


def bytes_until_closed(client: socket.socket) -> int:
    """How many bytes of a header can be sent, one by one."""
    for sent in range(1000):
        try:
            client.sendall(HEAD[sent % 10 : sent % 10 + 1])
            if client.recv(1) == b"":
                return sent
        except TimeoutError:
            continue
        except ConnectionError:
            return sent
    return 1000


def test_half_sent_headers_after_an_answer_are_closed(client: socket.socket) -> None:
    client.sendall(HEAD + b"\r\n" + BODY)
    while not client.recv(65536).endswith(b"}"):
        pass
    client.sendall(b"GET /hea")
    assert received(client) == b""


@pytest.mark.parametrize("sent", [0, 5])
def test_half_sent_bodies_are_answered_408_and_closed(client: socket.socket, sent: int) -> None:
    client.sendall(HEAD + b"\r\n" + BODY[:sent])
    head, _, body = received(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert (error["code"], error["type"], error["param"]) == (
        "request_timeout",
        "invalid_request_error",
        None,
    )
    assert f"{sent} bytes" in error["message"]


def test_whole_requests_are_answered(impatient: Served, client: socket.socket) -> None:
    for _ in range(2):
        client.sendall(HEAD)
        client.sendall(b"\r\n" + BODY[:3])
        client.sendall(BODY[3:])
        answer = client.recv(65536)
        while not answer.endswith(b"}"):  # head and body may come apart
            answer += client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200 ")
    assert impatient.get("/health").status_code == 200


def test_answers_may_take_longer(impatient: Served) -> None:
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
    with httpx.Client(base_url=impatient.url, timeout=WAIT) as http:
        answer = http.post("/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 400


def test_a_server_whose_engine_has_failed_leaves_no_request_without_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those on open connections are answered, and new connections wait for the server that
    follows."""
    monkeypatch.setattr(connections, "FAILED_SECONDS", 0.5)
    engines = [True, True]

    def begin(number: int) -> threading.Thread:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-length", b"1")],
                }
            )
            await send({"type": "http.response.body", "body": str(number).encode()})

        config = server_config(answer, request_timeout=WAIT)
        config.lifespan = "off"
        server = EngineServer(config, listener, healthy=lambda: engines[number], drain=Drain(0.0))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        return thread

    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        first = begin(0)
        with httpx.Client(base_url=url_of(listener), timeout=WAIT) as client:
            assert client.get("/").text == "0"
            engines[0] = False
            last = client.get("/")
            while "connection" not in last.headers:
                last = client.get("/")
            assert (last.text, last.headers["connection"]) == ("0", "close")
            waiting = threading.Thread(target=lambda: answers.append(client.get("/").text))
            answers: list[str] = []
            waiting.start()
            first.join(timeout=WAIT)
            second = begin(1)
            waiting.join(timeout=WAIT)
            assert answers == ["1"]
        engines[1] = False
        second.join(timeout=WAIT)
        assert not first.is_alive()
        assert not second.is_alive()
