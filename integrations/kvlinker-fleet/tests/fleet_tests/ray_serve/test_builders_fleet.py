"""A fleet with a builder, over one Redis: what it computes, the others load."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.redis_server import RedisServer
from tests.waiting import PATIENCE, wait_until

from fleet_tests.ray_serve.fleets import CACHES, CHAT, START_SECONDS, asked, started

pytestmark = pytest.mark.whole

TEXTS = [
    " ".join(f"Person {n}-{line} lives in town {n * line}." for line in range(40)) for n in range(4)
]


def loaded(url: str) -> float:
    """How many chunks a server took from Redis."""
    told = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(told)
        for sample in family.samples
        if sample.name == "kvlinker:chunk_lookups_total"
        and (sample.labels["result"], sample.labels["tier"]) == ("hit", "redis")
    )


def test_builders_compute_for_the_others(tmp_path: Path, redis_server: RedisServer) -> None:
    options = (
        *("--replicas", "1", "--build-replicas", "1", "--ingresses", "1", "--cpus", "1"),
        *("--redis-url", redis_server.url, "--disk-space", "0", "--host-memory", "100MiB"),
        *("--build-tokens", "64", "--slo-tpot", "1000"),
    )
    with started(tmp_path, *options) as fleet:
        wait_until(lambda: len(fleet.ready()) == 2, START_SECONDS)
        made = fleet.http.post(CACHES, json={"chunks": TEXTS[:2]})
        builder = made.headers["x-kvlinker-replica"]
        ids = [each["id"] for each in made.json()["data"]]
        answer = fleet.http.post(CHAT, json=asked(*ids))
        server = answer.headers["x-kvlinker-replica"]
        assert server != builder
        assert loaded(f"http://{server}") == 2, "what the builder computed for the router"
        wait_until(lambda: asks(fleet.http, server))
        (pid,) = (each["pid"] for each in fleet.replicas() if each["id"] == builder)
        os.kill(pid, signal.SIGKILL)
        made = fleet.http.post(CACHES, json={"chunks": TEXTS[2:]})
        assert made.status_code == 200
        assert made.headers["x-kvlinker-replica"] == server
        wait_until(lambda: len(fleet.ready()) == 2, START_SECONDS)
        made = fleet.http.post(CACHES, json={"chunks": ["One more."]})
        assert made.headers["x-kvlinker-replica"] not in (server, builder)


numbers = iter(range(1000))


def asks(http: httpx.Client, server: str) -> bool:
    """Whether a server has a builder compute what it lacks; it learns of builders after a
    while."""
    before = loaded(f"http://{server}")
    document = {"text": f"Document {next(numbers)}. {TEXTS[0]}"}
    assert http.post(CHAT, json=asked(documents=[document])).status_code == 200
    return loaded(f"http://{server}") == before + 1
