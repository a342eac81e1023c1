"""Asking builders: when it pays, whom, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvlinker.service import builders as asking
from kvlinker.service.builders import Builders
from kvlinker.settings import load_settings
from kvlinker.store import ChunkStore
from kvlinker.store.loading.bandwidths import Bandwidths
from tests.clocks import ManualClock

KEY = "ab" * 32


class Builder(ThreadingHTTPServer):
    """Answers every request with ``status``, once it may."""

    def __init__(self) -> None:
        self.status, self.asked = 200, list[str]()
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
        self.server.may_answer.wait(30)
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
def bandwidths() -> Bandwidths:
    return Bandwidths()


@pytest.fixture
def make(bandwidths: Bandwidths) -> Iterator[Any]:
    made: list[Builders] = []

    def make(*urls: str, shared: bool = True, **options: Any) -> Builders:
        tiers = (SimpleNamespace(name="redis", shared=shared),)
        store = SimpleNamespace(slower_tiers=lambda: tiers, bandwidths=bandwidths)
        options = {"token_bytes": 1000, "least_tokens": 100} | options
        made.append(Builders(urls, cast(ChunkStore, store), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_builder_is_asked_by_key(builder: Builder, make: Any) -> None:
    asked = make(builder.url, api_key="root").ask(KEY, 200, 1.0)
    assert asked.result(10) is True
    assert builder.asked == [f'/v1/chunks/build {{"key":"{KEY}"}} Bearer root']
    builder.status = 404
    assert make(builder.url).ask(KEY, 200, 1.0).result(10) is False


def test_it_is_asked_where_that_pays(builder: Builder, make: Any, bandwidths: Bandwidths) -> None:
    assert make(builder.url).ask(KEY, 99, 1.0) is None, "short"
    assert make(builder.url, shared=False).ask(KEY, 200, 1.0) is None, "nothing is shared"
    assert make(builder.url).ask(KEY, 200, 0.1).result(10), "nothing was measured"
    bandwidths.note("redis", 1_000_000, 1.0)  # 200 tokens take 0.2 s
    assert make(builder.url).ask(KEY, 200, 0.1) is None, "computing is quicker"
    assert make(builder.url).ask(KEY, 200, 0.3).result(10)
    assert make(builder.url).ask(KEY, 200, None).result(10), "computing was not measured"


def test_a_slow_builder_is_given_up(
    builder: Builder, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "LEAST_PATIENCE", 0.2)
    builder.may_answer.clear()
    assert make(builder.url).ask(KEY, 200, 0.01).result(10) is False
    assert len(builder.asked) == 1


def test_a_builder_that_is_gone_is_passed_over_for_a_while(builder: Builder, make: Any) -> None:
    clock = ManualClock()
    gone = "http://127.0.0.1:9"
    builders = make(gone, builder.url, clock=clock)
    keys = [f"{number:064x}" for number in range(8)]
    assert all(builders.ask(key, 200, 1.0).result(10) for key in keys)
    assert len(builder.asked) == len(keys)
    alone = make(gone, clock=clock)
    assert alone.ask(KEY, 200, 1.0).result(10) is False
    assert alone.ask(KEY, 200, 1.0) is None
    clock.advance(asking.AWAY_SECONDS)
    assert alone.ask(KEY, 200, 1.0).result(10) is False


def test_no_more_are_asked_than_answer(
    builder: Builder, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "MOST_ASKED", 2)
    builders = make(builder.url)
    builder.may_answer.clear()
    asked = [builders.ask(KEY, 200, 5.0) for _ in range(2)]
    assert builders.ask(KEY, 200, 5.0) is None
    builder.may_answer.set()
    assert [each.result(10) for each in asked] == [True, True]
    assert builders.ask(KEY, 200, 5.0).result(10)
    builders.close()
    assert builders.ask(KEY, 200, 5.0) is None


def test_the_settings_name_builders() -> None:
    store = cast(ChunkStore, None)
    assert Builders.of(load_settings(), store, token_bytes=1) is None
    named = load_settings(builders="http://10.0.0.7:8000/,http://10.0.0.8:8000")
    assert named.builders == ("http://10.0.0.7:8000", "http://10.0.0.8:8000")
    made = Builders.of(named, store, token_bytes=1)
    assert made is not None
    made.close()
    builds = named.model_copy(update={"role": "build"})
    assert Builders.of(builds, store, token_bytes=1) is None, "a builder computes itself"
    with pytest.raises(Exception, match="is no address"):
        load_settings(builders="10.0.0.7:8000")
