"""Speaking with builders over HTTP, and with some that end in the middle."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvlinker.doors.client.builders import BuilderClient
from tests.waiting import PATIENCE

KEY = "ab" * 32


class Builder(ThreadingHTTPServer):
    """Answers every request with ``status``, or cuts it off without one, once it may."""

    def __init__(self) -> None:
        self.status: int | None = 200
        self.asked: list[str] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Builder

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(f"{self.path} {body.decode()} {self.headers['Authorization']}")
        self.server.may_answer.wait(PATIENCE)
        if self.server.status is not None:
            self.send_response(self.server.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def builder() -> Iterator[Builder]:
    made = Builder()
    yield made
    made.may_answer.set()
    made.shutdown()
    made.server_close()


@pytest.fixture
def client(builder: Builder) -> Iterator[BuilderClient]:
    made = BuilderClient(lambda: [builder.url], "root")
    yield made
    made.close()


def test_a_builder_is_asked_by_key(builder: Builder, client: BuilderClient) -> None:
    assert client.urls() == [builder.url]
    assert client.build(builder.url, KEY, PATIENCE) is True
    assert builder.asked == [f'/v1/chunks/build {{"key":"{KEY}"}} Bearer root']
    builder.status = 404
    assert client.build(builder.url, KEY, PATIENCE) is False


def test_one_that_ends_meanwhile_is_gone(builder: Builder, client: BuilderClient) -> None:
    builder.status = None
    with pytest.raises(ConnectionError, match="disconnected"):
        client.build(builder.url, KEY, PATIENCE)
    for nowhere in ("http://127.0.0.1:9", "http://☃.example"):
        with pytest.raises(ConnectionError):
            client.build(nowhere, KEY, PATIENCE)


def test_a_slow_one_is_given_up(builder: Builder, client: BuilderClient) -> None:
    builder.may_answer.clear()
    with pytest.raises(TimeoutError):
        client.build(builder.url, KEY, 0.1)


def test_a_closed_client_asks_nobody(builder: Builder, client: BuilderClient) -> None:
    client.close()
    with pytest.raises(ConnectionError):
        client.build(builder.url, KEY, PATIENCE)
    assert builder.asked == []
