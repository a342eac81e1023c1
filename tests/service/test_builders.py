"""Asking builders: when it pays, whom, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvlinker.service import builders as asking
from kvlinker.service.builders import BuilderClient, Builders
from kvlinker.store import ChunkStore
from kvlinker.store.loading.bandwidths import Bandwidths
from tests.clocks import ManualClock
from tests.waiting import PATIENCE, wait_until

KEY = "ab" * 32
GONE, REFUSING, ONE, OTHER = "gone", "refusing", "one", "other"


class Client:
    """Builders of which some are gone, or refuse, and the others answer once they may."""

    def __init__(self, *urls: str) -> None:
        self.all = list(urls)
        self.asked: list[tuple[str, str, float]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.closed = False

    def urls(self) -> list[str]:
        return self.all

    def build(self, url: str, key: str, seconds: float) -> bool:
        self.asked.append((url, key, seconds))
        if url == GONE or self.closed:
            raise ConnectionError("gone")
        if not self.may_answer.wait(min(seconds, PATIENCE)):
            raise TimeoutError("slow")
        if self.closed:
            raise ConnectionError("closed")
        return url != REFUSING

    def close(self) -> None:
        self.closed = True
        self.may_answer.set()


@pytest.fixture
def bandwidths() -> Bandwidths:
    return Bandwidths()


@pytest.fixture
def make(bandwidths: Bandwidths) -> Iterator[Any]:
    made: list[Builders] = []

    def make(client: Client, shared: bool = True, **options: Any) -> Builders:
        tiers = (SimpleNamespace(name="redis", shared=shared),)
        store = SimpleNamespace(slower_tiers=lambda: tiers, bandwidths=bandwidths)
        options = {"least_tokens": 100} | options
        made.append(
            Builders(
                cast(BuilderClient, client),
                cast(ChunkStore, store),
                kv_bytes=lambda n: 1000 * n,
                **options,
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_each_chunk_is_asked_for_at_one_builder(make: Any) -> None:
    """The same for whoever asks; the next one where that refuses, and none where all do."""
    keys = [f"{number:064x}" for number in range(20)]
    clients = [Client(ONE, OTHER), Client(OTHER, ONE)]
    for client in clients:
        assert all(make(client).ask(key, 200, 1.0).result(PATIENCE) for key in keys)
    asked = [[(url, key) for url, key, _ in client.asked] for client in clients]
    assert asked[0] == asked[1]
    assert {url for url, _ in asked[0]} == {ONE, OTHER}
    assert make(Client(REFUSING, ONE)).ask(KEY, 200, 1.0).result(PATIENCE)
    assert make(Client(REFUSING)).ask(KEY, 200, 1.0).result(PATIENCE) is False


def test_it_is_asked_where_that_pays(make: Any, bandwidths: Bandwidths) -> None:
    assert make(Client(ONE)).ask(KEY, 99, 1.0) is None, "short"
    assert make(Client(ONE), shared=False).ask(KEY, 200, 1.0) is None, "nothing is shared"
    assert make(Client()).ask(KEY, 200, 1.0) is None, "there is none now"
    assert make(Client(ONE)).ask(KEY, 200, 0.1).result(PATIENCE), "nothing was measured"
    bandwidths.note("redis", 1_000_000, 1.0)  # 200 tokens take 0.2 s
    assert make(Client(ONE)).ask(KEY, 200, 0.1) is None, "computing is quicker"
    assert make(Client(ONE)).ask(KEY, 200, 0.3).result(PATIENCE)
    assert make(Client(ONE)).ask(KEY, 200, None).result(PATIENCE), "computing was not measured"


def test_a_slow_builder_is_given_up(make: Any) -> None:
    """In a time that goes by what computing takes; no other is asked, which would take as long."""
    client = Client(ONE, OTHER)
    builders = make(client, clock=ManualClock())
    for seconds in (10.0, 0.01, None):
        assert builders.ask(KEY, 200, seconds).result(PATIENCE)
    assert [patience for _, _, patience in client.asked] == [
        pytest.approx(asking.PATIENCE * 10.0),
        asking.LEAST_PATIENCE,
        asking.UNMEASURED_SECONDS,
    ]
    client.asked.clear()
    client.may_answer.clear()
    assert builders.ask(KEY, 200, 0.01).result(PATIENCE) is False
    assert len(client.asked) == 1


def test_a_builder_that_is_gone_is_passed_over_for_a_while(make: Any) -> None:
    clock = ManualClock()
    client = Client(GONE, ONE)
    builders = make(client, clock=clock)
    keys = [f"{number:064x}" for number in range(8)]
    assert all(builders.ask(key, 200, 1.0).result(PATIENCE) for key in keys)
    assert [url for url, _, _ in client.asked].count(ONE) == len(keys)
    assert [url for url, _, _ in client.asked].count(GONE) == 1
    client.all = [GONE]
    assert builders.ask(KEY, 200, 1.0) is None
    clock.advance(asking.AWAY_SECONDS)
    assert builders.ask(KEY, 200, 1.0).result(PATIENCE) is False


def test_no_more_are_asked_than_answer(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "MOST_ASKED", 2)
    client = Client(ONE)
    builders = make(client)
    client.may_answer.clear()
    asked = [builders.ask(KEY, 200, 30.0) for _ in range(2)]
    assert builders.ask(KEY, 200, 5.0) is None
    client.may_answer.set()
    assert [each.result(PATIENCE) for each in asked] == [True, True]
    assert builders.ask(KEY, 200, 5.0).result(PATIENCE)


def test_closing_ends_what_is_asked(make: Any) -> None:
    client = Client(ONE)
    builders = make(client)
    client.may_answer.clear()
    asked = builders.ask(KEY, 200, 30.0)
    wait_until(lambda: client.asked)
    builders.close()
    assert asked.result(PATIENCE) is False
    assert builders.ask(KEY, 200, 5.0) is None


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


def test_a_slow_answer_raises(builder: Builder, client: BuilderClient) -> None:
    builder.may_answer.clear()
    with pytest.raises(TimeoutError):
        client.build(builder.url, KEY, 0.1)


def test_a_closed_client_asks_nobody(builder: Builder, client: BuilderClient) -> None:
    client.close()
    with pytest.raises(ConnectionError):
        client.build(builder.url, KEY, PATIENCE)
    assert builder.asked == []
