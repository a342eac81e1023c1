"""The router's /status and /metrics: each replica's, and what all are together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.doors.http.serving import Served, listening, serving, tiny_model, tiny_settings
from tests.waiting import wait_until

from fleet_tests.test_routing_over_http import TEXTS, asked, routing, settings, status
from kvlinker.doors.http.app import create_app
from kvlinker.doors.http.fields.server_status import ServerStatus
from kvlinker.llm import LLM
from kvlinker.settings import Settings
from kvlinker_fleet.metrics import exposition
from kvlinker_fleet.views import read_answers, summed

__all__ = ["settings"]

Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


def figures(text: str | bytes) -> Figures:
    families = text_string_to_metric_families(text if isinstance(text, str) else text.decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Served]]:
    """Two on one state directory, and one on another."""
    with ExitStack() as stack:
        made = []
        for folder in ("a", "a", "b"):
            one = tiny_settings(tmp_path / folder)
            llm = LLM.from_model(tiny_model(), one)
            made.append(stack.enter_context(serving(llm, one)))
        yield made


def test_sums_of_servers(servers: list[Served], settings: Settings) -> None:
    with routing(settings, *(server.url for server in servers)) as router:
        for server in servers:
            server.cache(TEXTS[0], TEXTS[1])
            server.llm.store.flush()
            assert server.post("/v1/chat/completions", asked()).status_code == 200
            server.wait_until_idle()
        wait_until(lambda: sum(each["resident_chunks"] for each in status(router)) == 4)
        told = router.get("/status").json()
        alone = [server.get("/status").json() for server in servers]
        seen = figures(router.get("/metrics").text)
    for each, server in zip(told["replicas"], servers, strict=True):
        assert each["id"] == urlsplit(server.url).netloc
        assert (each["address"], each["pid"]) == (server.url, os.getpid())
        assert (each["state"], each["reason"]) == ("ready", None)
        assert each["epoch"]
    for name in ("requests", "kv_slots", "prompt_tokens"):
        for part, value in told[name].items():
            assert value == sum(one[name][part] for one in alone)
    assert told["requests"]["finished"] == 3
    tiers = {tier["name"]: tier for tier in told["tiers"]}
    assert tiers["host"]["chunks"] == 4, "the second found its own on the first one's disk"
    assert tiers["disk"]["chunks"] == 4, "two servers share one disk tier"
    names = {urlsplit(server.url).netloc for server in servers}
    for name in names:
        of_one = frozenset({"reason": "length", "replica": name}.items())
        assert seen["kvlinker:requests_total", of_one] == 1
    assert seen["kvlinker:fleet_requests_running", frozenset()] == 0
    assert seen["kvlinker:fleet_store_chunks", frozenset({("tier", "host")})] == 4
    assert ("kvlinker:fleet_store_chunks", frozenset({("tier", "disk")})) not in seen


def told_by(requests: int, running: int) -> str:
    return (
        "# TYPE kvlinker:requests_total counter\n"
        f'kvlinker:requests_total{{reason="stop"}} {requests}\n'
        f"# TYPE kvlinker:requests_running gauge\nkvlinker:requests_running {running}\n"
        "# TYPE kvlinker:audit_agreement gauge\nkvlinker:audit_agreement 0.5\n"
    )


def test_sums_are_those_of_the_replicas_that_there_are() -> None:
    """Whoever is asked: a router that began today tells what an older one does."""
    total, running = "kvlinker:requests_total", "kvlinker:fleet_requests_running"
    steps: tuple[tuple[dict[str, str], dict[str, float], float], ...] = (
        ({"a": told_by(10, 1), "b": told_by(5, 2)}, {"a": 10, "b": 5}, 3),
        ({"a": told_by(12, 1)}, {"a": 12}, 1),
        ({"a": "no metrics {", "b": told_by(1, 4)}, {"b": 1}, 4),
        ({"a": 'x{a="b", ="d"} 1.0\n', "b": told_by(1, 4)}, {"b": 1}, 4),
        ({"a": told_by(2, 1) + "x 1 1e999\n", "b": told_by(1, 4)}, {"a": 2, "b": 1}, 5),
    )
    for texts, requests, at_once in steps:
        seen = figures(exposition(texts))
        assert seen[running, frozenset()] == at_once
        assert {
            dict(labels)["replica"]: value
            for (name, labels), value in seen.items()
            if name == total
        } == requests
        summed = {name for name, _ in seen if name.startswith("kvlinker:fleet_")}
        assert summed == {running}


def test_answers_of_another_version_are_left_out() -> None:
    known = summed([], 0)
    texts = [known.model_dump_json(), "{}", "<html>", known.model_dump_json()]
    assert read_answers(ServerStatus, texts) == [known, known]


def test_a_fleet_without_servers(settings: Settings) -> None:
    with routing(settings, "http://127.0.0.1:9") as router:
        told = router.get("/status").json()
        assert (told["requests"]["running"], told["tiers"]) == (0, [])
        (replica,) = told["replicas"]
        assert (replica["state"], replica["pid"], replica["epoch"]) == ("starting", None, None)
        assert "does not answer" in replica["reason"]
        assert router.get("/metrics").status_code == 200
    ServerStatus.model_validate(summed([], 0).model_dump())


def test_states_on_the_way(tmp_path: Path, settings: Settings) -> None:
    one = tiny_settings(tmp_path / "a")
    app = create_app(LLM.from_model(tiny_model(), one), one)
    with listening(app, one) as url, routing(settings, url) as router:

        def state() -> str:
            (replica,) = status(router)
            return str(replica["state"])

        assert state() == "ready"
        app.state.served.drain.begin()
        wait_until(lambda: state() == "draining")


def test_a_server_that_ends_is_dead(tmp_path: Path, settings: Settings) -> None:
    one = tiny_settings(tmp_path / "a")
    with ExitStack() as stack:
        server = stack.enter_context(ExitStack())
        url = server.enter_context(serving(LLM.from_model(tiny_model(), one), one)).url
        router = stack.enter_context(routing(settings, url))
        server.close()
        wait_until(lambda: status(router)[0]["state"] == "dead")
        (replica,) = status(router)
        assert replica["reason"].startswith("does not answer")
        assert replica["pid"] == os.getpid()
