"""``kvlinker fleet`` on one machine, with the model in the box: every row of what a balancer before
two servers gets wrong, and kills."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.waiting import PATIENCE, wait_until
from typer.testing import CliRunner

from fleet_tests.ray_serve.fleets import (
    CACHES,
    CHAT,
    START_SECONDS,
    RunningFleet,
    asked,
    started,
)
from kvlinker import LLM
from kvlinker.cli import app

pytestmark = pytest.mark.whole

TEXTS = [
    "Mira Holt lives in Varna. She works as a baker.\n\n",
    "Tom Reyes lives in Oslo. He works as a pilot.\n\n",
    "Ada Brandt lives in Porto. She works as a nurse.\n\n",
    "Jon Okafor lives in Lima. He works as a cook.\n\n",
]
BLOCK = 64
"""The tokens at the end of a prompt that an engine may not keep: vLLM keeps whole blocks."""

KEYS = {"KVLINKER_API_KEYS": "some,small", "KVLINKER_TENANT_QUOTAS": '{"small": {"caches": 5}}'}
SMALL = {"authorization": "Bearer small"}
POLICY = "query-5-sensitive"
"""A policy that both engines have."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    state = tmp_path_factory.mktemp("state")
    options = ("--replicas", "2", "--dtype", "float32", "--host-memory", "200MiB")
    with started(state, *options, environment=KEYS, authorization="Bearer some") as fleet:
        yield fleet


@pytest.fixture
def fleet(running: RunningFleet) -> RunningFleet:
    """With two replicas and two ingresses, whatever the test before killed."""
    wait_until(lambda: len(running.ready()) == 2 and len(running.ingresses()) == 2)
    return running


def direct(url: str, method: str, path: str, **options: Any) -> httpx.Response:
    """Ask one replica."""
    headers = {"authorization": "Bearer some"} | options.pop("headers", {})
    return httpx.request(method, url + path, headers=headers, timeout=PATIENCE, **options)


def test_ids_are_good_everywhere_and_answers_are_those_of_one_server(
    fleet: RunningFleet, tmp_path: Path
) -> None:
    ids = fleet.cache(*TEXTS)
    linked = asked(*ids, link={"policy": POLICY})
    answers = [fleet.http.post(CHAT, json=linked) for _ in range(20)]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-kvlinker-replica"] for answer in answers} <= {
        url.removeprefix("http://") for url in fleet.ready()
    }
    told = [direct(url, "POST", CHAT, json=linked).json() for url in fleet.ready()]
    with LLM(state_dir=tmp_path, dtype="float32", threads=1) as alone:
        own = alone.generate_context_cache(TEXTS)
        (message,) = asked()["messages"]
        content = [*own, message["content"][0]["text"]]
        answer = alone.chat_completion(
            [{"role": "user", "content": content}], policy=POLICY, max_tokens=4, temperature=0
        )
    texts = {one["choices"][0]["message"]["content"] for one in (*told, answers[0].json())}
    assert texts == {answer.text} == {"Oslo"}
    usages = [each["usage"]["prompt_tokens_details"] for each in (answers[0].json(), *told)]
    assert answer.usage.cached_tokens in {each["cached_tokens"] for each in usages}


def test_lists_and_deletions_are_alike(fleet: RunningFleet) -> None:
    (kept,) = fleet.cache(TEXTS[0], authorization="Bearer small")
    for url in fleet.ready():
        listed = direct(url, "GET", CACHES, headers=SMALL).json()["data"]
        assert [each["id"] for each in listed] == [kept]
        assert direct(url, "POST", CHAT, json=asked(kept), headers=SMALL).status_code == 200
        assert direct(url, "POST", CHAT, json=asked(kept)).status_code == 404, "another tenant's"
    assert fleet.http.delete(f"{CACHES}/{kept}", headers=SMALL).status_code == 200
    for url in fleet.ready():
        assert direct(url, "GET", f"{CACHES}/{kept}", headers=SMALL).status_code == 404
        assert direct(url, "POST", CHAT, json=asked(kept), headers=SMALL).status_code == 404


def test_a_quota_is_one_quota(fleet: RunningFleet) -> None:
    def create(number: int) -> tuple[int, str]:
        body = {"chunks": [f"Text {number}."]}
        answer = fleet.http.post(CACHES, json=body, headers=SMALL)
        return answer.status_code, answer.json().get("data", [{}])[0].get("id")

    with ThreadPoolExecutor(8) as clients:
        made = list(clients.map(create, range(20)))
    statuses = [status for status, _ in made]
    assert (statuses.count(200), statuses.count(403)) == (5, 15)
    for _, cache_id in made:
        if cache_id:
            assert fleet.http.delete(f"{CACHES}/{cache_id}", headers=SMALL).status_code == 200


def test_a_conversation_reuses_its_beginning(fleet: RunningFleet) -> None:
    """Each turn goes where the turns before it were computed."""
    turns = [{"role": "user", "content": "".join(TEXTS) + "Question: Where does Jon Okafor live?"}]
    lengths, reused, replicas = [], [], set()
    for number in range(6):
        answer = fleet.http.post(CHAT, json=asked(messages=turns, max_tokens=16))
        replicas.add(answer.headers["x-kvlinker-replica"])
        usage = answer.json()["usage"]
        lengths.append(usage["prompt_tokens"])
        reused.append(usage["prompt_tokens_details"]["exact_cached_tokens"])
        said = answer.json()["choices"][0]["message"]["content"]
        turns += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"Question {number}: Where does Ada Brandt live?"},
        ]
    assert len(replicas) == 1
    for before, now in itertools.pairwise(range(6)):
        assert reused[now] >= lengths[before] - BLOCK


def test_what_is_deleted_by_metadata_is_gone_everywhere(fleet: RunningFleet) -> None:
    body = {"chunks": TEXTS, "metadata": {"of": "all"}}
    assert fleet.http.post(CACHES, json=body, headers=SMALL).status_code == 200
    removed = fleet.http.request("DELETE", CACHES, params={"metadata[of]": "all"}, headers=SMALL)
    assert removed.json()["deleted"] == len(TEXTS)
    for url in fleet.ready():
        assert direct(url, "GET", CACHES, headers=SMALL).json()["data"] == []


def test_nothing_listens_where_others_reach_it(fleet: RunningFleet) -> None:
    hosts = {
        each.laddr.ip
        for process in fleet.processes()
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }
    assert hosts == {"127.0.0.1", "::ffff:127.0.0.1"}


def test_its_processes_are_as_urgent_as_the_command(fleet: RunningFleet) -> None:
    """Ray's workers are less, and do not get to run where a machine has much to do."""
    urgency = {process.nice() for process in fleet.named("ServeReplica")}
    assert urgency == {psutil.Process(fleet.process.pid).nice()}


def test_keys_and_limits_hold_before_anything_is_read(fleet: RunningFleet) -> None:
    stranger = fleet.http.post(CHAT, json=asked(), headers={"authorization": "Bearer x"})
    assert stranger.status_code == 401
    assert fleet.http.get("/v1/models", headers={"authorization": ""}).status_code == 401
    address = fleet.http.base_url
    with socket.create_connection((address.host, address.port or 80), PATIENCE) as client:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer some\r\n"
        client.sendall(f"{head}Content-Length: {300 << 20}\r\n\r\n".encode())
        assert client.recv(12) == b"HTTP/1.1 413"
    assert fleet.http.get("/").headers["content-type"].startswith("text/html")


def test_replicas_tell_what_they_have_in_memory(fleet: RunningFleet) -> None:
    """An engine's own memory counts as the store's does. More chunks come than other tests deleted,
    which vLLM's workers tell with their next request."""
    before = sum(each["resident_chunks"] for each in fleet.replicas())
    ids = fleet.cache(*(f"{TEXTS[0]}It is told anew, number {number}." for number in range(12)))
    assert fleet.http.post(CHAT, json=asked(*ids[:2])).status_code == 200
    wait_until(lambda: sum(each["resident_chunks"] for each in fleet.replicas()) > before)


def test_status_lists_the_replicas(fleet: RunningFleet) -> None:
    run = CliRunner().invoke(app, ["fleet", "status", "--url", fleet.url, "--api-key", "some"])
    assert run.exit_code == 0, run.output
    lines = run.stdout.splitlines()
    assert len(lines) == 3
    for line, replica in zip(lines[1:], fleet.replicas(), strict=True):
        assert line.split()[:3] == [replica["id"], "both", "ready"]
        assert str(replica["pid"]) in line.split()


def test_a_killed_replica_is_replaced(fleet: RunningFleet) -> None:
    """What has no first byte is answered by the other; streams end with an error event; ids stay
    good."""
    ids = fleet.cache(*TEXTS)
    endless = asked(*ids, max_tokens=1500, ignore_eos=True, stream=True)
    with ThreadPoolExecutor(8) as clients:
        with fleet.http.stream("POST", CHAT, json=endless) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            lost = stream.headers["x-kvlinker-replica"]
            (pid,) = (each["pid"] for each in fleet.replicas() if each["id"] == lost)
            chats = [
                clients.submit(fleet.http.post, CHAT, json=asked(*ids, max_tokens=16))
                for _ in range(12)
            ]
            os.kill(pid, signal.SIGKILL)
            *_, error, end = lines
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"
        assert end == "data: [DONE]"
        assert {chat.result().status_code for chat in chats} == {200}
    wait_until(lambda: lost not in {each["id"] for each in fleet.replicas()})
    wait_until(lambda: len(fleet.ready()) == 2, START_SECONDS)
    for url in fleet.ready():
        assert direct(url, "POST", CHAT, json=asked(*ids)).status_code == 200


def test_a_killed_ingress_is_replaced(fleet: RunningFleet) -> None:
    """In the middle of traffic: its connections break, and clients that connect anew find the other
    one."""
    one, other = fleet.ingresses()

    def ask(_: int) -> int | None:
        """The status of an answer over a new connection; None where that breaks."""
        try:
            url, headers = f"{fleet.url}{CHAT}", fleet.http.headers
            return httpx.post(url, json=asked(), headers=headers, timeout=PATIENCE).status_code
        except httpx.TransportError:
            return None

    with ThreadPoolExecutor(8) as clients:
        under_way = [clients.submit(ask, number) for number in range(24)]
        next(each for each in under_way if each.result() == 200)
        one.kill()
        one.wait(PATIENCE)
        later = clients.map(ask, range(10))
        assert set(later) == {200}
        assert {each.result() for each in under_way} <= {200, None}
    wait_until(lambda: len(fleet.ingresses()) == 2, START_SECONDS)
    assert other in fleet.ingresses()
