"""Clients that read slowly or not at all are cut off, and take neither memory nor time from others
until then."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from kvlinker.doors.http.edge.connections import TimedProtocol
from tests.doors.http.serving import Served, listening, serving, tiny_settings

PIECE = bytes(1 << 20)
PIECES = 64  # more than what the system buffers for a connection
WAIT = 20.0
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Answers:
    """An app whose answers are large: in pieces, or at once. Told: how many pieces it could
    send."""

    def __init__(self, *, at_once: bool) -> None:
        self.at_once = at_once
        self.sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        size = 0 if scope["path"] == "/health" else PIECES
        body = PIECE * size if self.at_once else b""
        for _ in range(0 if self.at_once else size):
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            self.sent += 1
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Counts connections that had to wait for their client, and are gone."""
    semaphore = threading.Semaphore(0)
    real: Callable[[TimedProtocol, Exception | None], None] = TimedProtocol.connection_lost

    def connection_lost(self: TimedProtocol, exc: Exception | None) -> None:
        waited = self._cut_off is not None
        real(self, exc)
        if waited:
            semaphore.release()

    monkeypatch.setattr(TimedProtocol, "connection_lost", connection_lost)
    return semaphore


@contextmanager
def impatient(app: ASGIApp, folder: Path, seconds: float = 0.25) -> Iterator[str]:
    with listening(app, tiny_settings(folder, request_timeout=seconds)) as url:  # type: ignore[arg-type]
        yield url


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    """A client with room for a few bytes."""
    address = urlsplit(url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(WAIT)
        client.connect((address.hostname, address.port))
        yield client


def drips(client: socket.socket, until: threading.Semaphore) -> bool:
    """Read a byte now and then until a connection is gone; whether that was within ``WAIT``
    seconds."""
    for _ in range(int(WAIT / 0.02)):
        if until.acquire(timeout=0.02):
            return True
        client.recv(1)
    return False


@pytest.fixture(autouse=True)
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvlinker.doors.http.edge.connections.LEAST_READ_BYTES_PER_SECOND", len(PIECE) * PIECES
    )


@pytest.mark.parametrize("at_once", [False, True])
def test_clients_that_read_byte_by_byte_are_cut_off(
    tmp_path: Path, lost: threading.Semaphore, at_once: bool
) -> None:
    """Also those whose answer is complete: nothing but its connection would tell that it is not
    read."""
    app = Answers(at_once=at_once)
    with impatient(app, tmp_path) as url, connected(url) as client:
        client.sendall(REQUEST)
        assert drips(client, lost)
        assert at_once or app.sent > 0


def test_what_waits_for_a_slow_client_is_one_piece(
    tmp_path: Path, lost: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = []
    real = TimedProtocol.pause_writing

    def pause_writing(self: TimedProtocol) -> None:
        real(self)
        waiting.append(self.transport.get_write_buffer_size())

    monkeypatch.setattr(TimedProtocol, "pause_writing", pause_writing)
    app = Answers(at_once=False)
    with impatient(app, tmp_path) as url, connected(url) as client:
        client.sendall(REQUEST)
        assert lost.acquire(timeout=WAIT)
        assert 0 < max(waiting) < 2 * len(PIECE)


@pytest.mark.parametrize("at_once", [False, True])
def test_clients_that_read_get_all(
    tmp_path: Path, lost: threading.Semaphore, at_once: bool
) -> None:
    with impatient(Answers(at_once=at_once), tmp_path, seconds=WAIT) as url:
        assert len(httpx.get(f"{url}/", timeout=WAIT).content) == len(PIECE) * PIECES
    assert not lost.acquire(blocking=False)


@pytest.mark.whole
def test_others_are_served_beside_64_that_read_and_64_that_send_a_byte_at_a_time(
    served: Served, lost: threading.Semaphore
) -> None:
    """All of these are cut off."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    settings = served.llm.settings.model_copy(update={"request_timeout": 1.0})
    with serving(served.llm, settings, closes=False) as running, ExitStack() as stack:
        readers, senders = (
            [stack.enter_context(connected(running.url)) for _ in range(64)] for _ in range(2)
        )
        for client in readers:
            client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        for client in senders:
            client.sendall(b"P")
        for _ in range(10):
            assert running.post("/v1/chat/completions", body).status_code == 200
        for client in senders:
            assert client.recv(1) == b""
        for _ in readers:
            assert lost.acquire(timeout=WAIT)
