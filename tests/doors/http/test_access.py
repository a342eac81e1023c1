"""Keys open doors, each its own; without keys nobody else can reach the server."""

from __future__ import annotations

import hashlib
import logging
import socket
import sqlite3
from collections.abc import Iterator
from itertools import product
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from kvlinker.base.errors import InvalidRequestError, KVLinkerError
from kvlinker.base.types.tenants import tenant_of_key
from kvlinker.doors.http.edge.address import bind, check_address, url_of
from kvlinker.doors.http.edge.guards import hosts_to_check
from kvlinker.settings import load_settings
from tests.doors.http.serving import Served, serving
from tests.waiting import PATIENCE

CACHES = "/v1/context_caches"
ALPHA = {"Authorization": "Bearer key-alpha"}
BETA = {"Authorization": "Bearer key-beta"}


@pytest.fixture(scope="module")
def hosted(served: Served) -> Iterator[Served]:
    """The same LLM behind a server with a name."""
    settings = served.llm.settings.model_copy(update={"allowed_hosts": ("friend.example",)})
    with serving(served.llm, settings, closes=False) as running:
        yield running


STRANGERS: list[dict[str, str]] = [
    {},
    {"Authorization": "Bearer wrong"},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer key-alph"},
    {"Authorization": "Bearer key-alphaa"},
    {"Authorization": "Basic key-alpha"},
    {"Authorization": "key-alpha"},
    {"Authorization": "Bearer sch\u00fcssel"},
    {"x-api-key": "wrong"},
    {"x-api-key": "Bearer key-alpha"},
]
CLOSED = [
    ("GET", CACHES),
    ("POST", "/v1/chat/completions"),
    ("GET", "/metrics"),
    ("GET", "/status"),
    ("GET", "/nowhere"),
]


def test_no_entry_without_a_known_key(keyed: Served, subtests: pytest.Subtests) -> None:
    for headers, (method, path) in product(STRANGERS, CLOSED):
        with subtests.test(f"{method} {path}", headers=headers):
            raw = {name: value.encode("latin-1") for name, value in headers.items()}
            answer = keyed.http.request(method, path, headers=raw)  # type: ignore[arg-type]
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/health", "/", "/docs"])
def test_open_routes(keyed: Served, path: str) -> None:
    assert keyed.get(path).status_code == 200


def test_known_keys_enter(keyed: Served, subtests: pytest.Subtests) -> None:
    paths = ("/metrics", "/status", "/v1/models", CACHES)
    for scheme, path in product(("Bearer", "bearer"), paths):
        headers = {"Authorization": f"{scheme} key-beta"}
        with subtests.test(f"{scheme} {path}"):
            assert keyed.get(path, headers=headers).status_code == 200


def test_keys_enter_by_a_header_of_their_own(keyed: Served) -> None:
    assert keyed.get("/v1/models", headers={"X-Api-Key": "key-beta"}).status_code == 200


def test_body_is_not_read_for_strangers(keyed: Served) -> None:
    assert keyed.http.post("/v1/chat/completions", content=b"{").status_code == 401


def test_tenants_do_not_see_each_other(keyed: Served, served: Served) -> None:
    created = keyed.post(CACHES, {"chunks": ["a secret of alpha's"]}, headers=ALPHA).json()["data"][
        0
    ]
    cache_id = created["id"]
    url = f"{CACHES}/{cache_id}"
    prompt = {"prompt": [{"type": "context_cache", "id": cache_id}], "max_tokens": 1}

    def attempts(served: Served, headers: dict[str, str]) -> list[Any]:
        return [
            served.get(url, headers=headers),
            served.http.patch(url, json={"name": "mine"}, headers=headers),
            served.http.delete(url, headers=headers),
            served.post("/v1/completions", prompt, headers=headers),
            served.post("/tokenize", {"prompt": prompt["prompt"]}, headers=headers),
        ]

    for other, headers in ((keyed, BETA), (served, {})):
        answers = attempts(other, headers)
        assert [answer.status_code for answer in answers] == [404] * 5
        assert {answer.json()["error"]["code"] for answer in answers} == {"context_cache_not_found"}
        listed = other.get(CACHES, params={"limit": 100}, headers=headers).json()["data"]
        assert cache_id not in [entry["id"] for entry in listed]
        assert other.get(CACHES, params={"after": cache_id}, headers=headers).status_code == 400
    assert keyed.get(url, headers=ALPHA).json() == created
    assert keyed.post("/v1/completions", prompt, headers=ALPHA).status_code == 200


def test_tenants_share_no_kv(keyed: Served) -> None:
    """The same text of two tenants is computed and stored twice, so that nobody can time what
    others cached."""
    ids = [
        keyed.post(CACHES, {"chunks": ["the same for both"]}, headers=headers).json()["data"][0][
            "id"
        ]
        for headers in (ALPHA, BETA)
    ]
    records = [
        keyed.llm.caches.get(cache_id, tenant=tenant_of_key(key))
        for cache_id, key in zip(ids, ("key-alpha", "key-beta"), strict=True)
    ]
    assert records[0].chunk == records[1].chunk
    assert records[0].chunk_key != records[1].chunk_key


def test_keys_are_written_nowhere(keyed: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        keyed.post(CACHES, {"chunks": ["something"]}, headers=ALPHA)
    assert "key-alpha" not in caplog.text
    assert "key-alpha" not in repr(keyed.llm.settings)
    with sqlite3.connect(keyed.llm.settings.state_dir / "catalog.sqlite") as catalog:
        rows = "\n".join(catalog.iterdump())
    assert "key-alpha" not in rows
    assert "key-" + hashlib.sha256(b"key-alpha").hexdigest()[:32] in rows


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    check_address(host, ())


def test_other_addresses_need_keys(subtests: pytest.Subtests) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.7", "example.org", "", "localhost.example.org"):
        with subtests.test(host):
            with pytest.raises(InvalidRequestError, match="loopback"):
                check_address(host, ())
            check_address(host, ("key",))


def test_taken_port_is_told() -> None:
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        port = int(url_of(listener).rsplit(":", 1)[1])
        with pytest.raises(KVLinkerError, match=str(port)):
            bind("127.0.0.1", port)


KNOWN_HOSTS = [
    "localhost",
    "LOCALHOST:8000",
    "127.0.0.1",
    "127.9.9.9:1",
    "[::1]:8000",
    "friend.example",
    "Friend.Example:80",
]


def test_known_hosts_are_answered(hosted: Served, subtests: pytest.Subtests) -> None:
    for host in KNOWN_HOSTS:
        with subtests.test(host):
            assert hosted.get("/v1/models", headers={"Host": host}).status_code == 200


FOREIGN_HOSTS = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "8.8.8.8",
    "[::2]",
    "[",
    "",
]
PATHS = ["/v1/models", "/", "/health", f"{CACHES}/", "/nowhere"]


def test_foreign_hosts_are_refused(
    served: Served, hosted: Served, subtests: pytest.Subtests
) -> None:
    """A page whose name points to 127.0.0.1 must not read a server that asks for no key."""
    for host, path in product(FOREIGN_HOSTS, PATHS):
        with subtests.test(host, path=path):
            for server in (served, hosted):
                answer = httpx.get(f"{server.url}{path}", headers={"Host": host})
                assert answer.status_code == 421
                assert "location" not in answer.headers
                error = answer.json()["error"]
                assert (error["code"], error["type"]) == ("unknown_host", "invalid_request_error")
                assert "allowed_hosts" in error["message"]


def test_any_host_may_be_allowed(served: Served, keyed: Served) -> None:
    assert keyed.get("/health", headers={"Host": "any.example"}).status_code == 200, (
        "keys protect it"
    )


CHECKED: list[tuple[dict[str, Any], tuple[str, ...] | None]] = [
    ({}, ("127.0.0.1",)),
    ({"host": "localhost"}, ("localhost",)),
    ({"allowed_hosts": "a.example, b.example"}, ("a.example", "b.example", "127.0.0.1")),
    ({"allowed_hosts": "*"}, None),
    ({"api_keys": "key"}, None),
    ({"api_keys": "key", "allowed_hosts": "a.example"}, ("a.example", "127.0.0.1")),
    ({"host": "0.0.0.0"}, None),
]


def test_which_hosts_are_checked(subtests: pytest.Subtests) -> None:
    for options, checked in CHECKED:
        with subtests.test(str(options)):
            assert hosts_to_check(load_settings(**options)) == checked


def test_http_1_0_needs_no_host(served: Served) -> None:
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer none", "x-api-key": "key-alpha"},
        {"x-api-key": "none", "Authorization": "Bearer key-alpha"},
        {"api-key": "key-alpha"},
    ],
)
def test_a_word_in_place_of_a_key_does_not_hide_one(keyed: Served, headers: dict[str, str]) -> None:
    assert keyed.http.get(CACHES, headers=headers).status_code == 200
