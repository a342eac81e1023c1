"""Requests that are framed or addressed in unusual ways, byte by byte."""

from __future__ import annotations

import json
import logging
import socket

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvlinker.base.types.limits import MAX_BODY_BYTES
from kvlinker.doors.http.edge import access_log
from kvlinker.doors.http.edge.guards import Reception
from tests.doors.http.serving import Served
from tests.waiting import PATIENCE


def exchanged(served: Served, request: bytes) -> bytes:
    """What the server sends until it closes the connection."""
    url = httpx.URL(served.url)
    with socket.create_connection((url.host, url.port), timeout=PATIENCE) as connection:
        connection.sendall(request)
        received = b""
        while data := connection.recv(65536):
            received += data
    return received


def answered(served: Served, target: str, host: str) -> bytes:
    """The answer to a GET, and only its first line and body."""
    request = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    return exchanged(served, request.encode())


def test_a_body_that_announces_too_much_is_refused_before_it_comes(served: Served) -> None:
    head = (
        "POST /v1/context_caches HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Expect: 100-continue\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n"
    )
    received = exchanged(served, head.encode())  # not a byte of the body
    assert received.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in received.lower()
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_too_large"


def test_two_lengths_of_one_body_are_refused_and_the_connection_closed(served: Served) -> None:
    request = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
        b" application/json\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET"
        b" /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    )
    received = exchanged(served, request)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"Transfer-Encoding" in received
    assert received.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "target", ["http://localhost/health", "HTTP://127.0.0.1:80/health", "http://[::1]/health"]
)
def test_absolute_targets(served: Served, target: str) -> None:
    assert answered(served, target, "localhost").startswith(b"HTTP/1.1 200 ")


def test_an_absolute_target_names_the_host(served: Served) -> None:
    assert answered(served, "http://evil.com/health", "localhost").startswith(b"HTTP/1.1 421 ")
    assert answered(served, "http://localhost/health", "evil.com").startswith(b"HTTP/1.1 200 ")
    assert answered(served, "http://localhost", "localhost").startswith(b"HTTP/1.1 200 ")


async def test_an_absolute_target_that_is_not_ascii_is_answered_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Servers that pass such bytes on are other than ours: so the scope is made here."""
    caplog.set_level(logging.INFO, access_log.logger.name)
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await Response(status_code=404)(scope, receive, send)

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "raw_path": b"http://h\xf6st/caf\xe9",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "state": {},
    }
    await Reception(app)(scope, receive, send)
    assert (seen[0]["path"], Headers(scope=seen[0])["host"]) == ("/caf\xe9", "h\xf6st")
    assert sent[0]["status"] == 404
    assert [record.getMessage().startswith("GET - 404") for record in caplog.records] == [True]


FOREIGN_HOSTS = [
    "[::1]evil.com",
    "[::1]:80evil.com",
    "localhost:80@evil.com",
    "evil.com@localhost",
    "localhost/evil",
    "[::1",
]


def test_hosts_that_only_begin_or_end_like_ones_own(
    served: Served, subtests: pytest.Subtests
) -> None:
    for host in FOREIGN_HOSTS:
        with subtests.test(host):
            assert answered(served, "/health", host).startswith(b"HTTP/1.1 421 ")
