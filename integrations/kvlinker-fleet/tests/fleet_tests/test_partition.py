"""A server that the router cannot reach for a while: nothing breaks, and nothing comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from tests.doors.http.serving import Served, tiny_settings
from tests.store.cutting_proxy import CuttingProxy
from tests.waiting import wait_until

from fleet_tests.test_routing_over_http import CHAT, TEXTS, asked, replica, routing, servers, status
from kvlinker.settings import Settings
from kvlinker_fleet import backends

__all__ = ["servers"]

pytestmark = pytest.mark.whole


@pytest.fixture
def far(servers: list[Served], monkeypatch: pytest.MonkeyPatch) -> Iterator[CuttingProxy]:
    """The network between the router and the first server."""
    monkeypatch.setattr(backends, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(backends, "SILENT_SECONDS", 4.0)
    with closing(CuttingProxy(urlsplit(servers[0].url).port or 0)) as proxy:
        yield proxy
        proxy.passing.set()


@pytest.fixture
def router(servers: list[Served], far: CuttingProxy, tmp_path: Path) -> Iterator[httpx.Client]:
    settings: Settings = tiny_settings(tmp_path / "router")
    urls = f"http://127.0.0.1:{far.port}", servers[1].url
    with routing(settings, *urls) as client:
        wait_until(lambda: both_ready(client))
        yield client


def both_ready(router: httpx.Client) -> bool:
    return [each["state"] for each in status(router)] == ["ready", "ready"]


def test_requests_under_way_are_answered_elsewhere_and_the_server_is_used_again(
    router: httpx.Client, servers: list[Served], far: CuttingProxy
) -> None:
    made = router.post("/v1/context_caches", json={"chunks": TEXTS}).json()["data"]
    prompt = asked(*(each["id"] for each in made))
    before = router.post(CHAT, json=prompt).json()["choices"]
    epochs = [each["epoch"] for each in status(router)]
    far.passing.clear()
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda _: router.post(CHAT, json=prompt), range(16)))
    assert {replica(answer) for answer in answers} == {urlsplit(servers[1].url).netloc}
    assert all(answer.json()["choices"] == before for answer in answers)
    far.passing.set()
    wait_until(lambda: both_ready(router))
    assert [each["epoch"] for each in status(router)] == epochs, "what it has is still known"

    def used() -> bool:
        with ThreadPoolExecutor(4) as clients:
            sent = clients.map(lambda _: replica(router.post(CHAT, json=asked())), range(8))
            return f"127.0.0.1:{far.port}" in set(sent)

    wait_until(used)


def test_a_stream_from_a_server_that_falls_silent_ends_with_an_error(
    router: httpx.Client, servers: list[Served], far: CuttingProxy
) -> None:
    for number in count():
        text = [
            {"role": "user", "content": f"Tell {number}."}
        ]  # one told before stays where it was
        endless = asked(messages=text, max_tokens=1900, ignore_eos=True, stream=True)
        with router.stream("POST", CHAT, json=endless) as stream:
            if stream.headers["x-kvlinker-replica"] != f"127.0.0.1:{far.port}":
                continue
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            far.passing.clear()
            *_, error, end = lines
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"
        assert end == "data: [DONE]"
        return
