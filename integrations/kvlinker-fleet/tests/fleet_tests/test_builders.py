"""Builders compute for other servers, which load what they built: processes of their own, over one
catalog and one Redis."""

from __future__ import annotations

import itertools
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.postgres_server import PostgresServer
from tests.redis_server import RedisServer
from tests.waiting import wait_until

from fleet_tests.processes import KVLINKER, Processes, url

pytestmark = pytest.mark.whole

CHAT = "/v1/chat/completions"
TEXTS = [
    " ".join(f"Person {n}-{line} lives in town {n * line}." for line in range(40))
    for n in range(1, 5)
]


@pytest.fixture
def processes(
    tmp_path: Path, postgres_server: PostgresServer, redis_server: RedisServer
) -> Iterator[Processes]:
    made = Processes(tmp_path, postgres_server, redis_server)
    yield made
    made.close()


def asked(*ids: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "context_cache", "id": each} for each in ids]
    content = [*parts, {"type": "text", "text": "Who lives in town 12?"}]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
        "temperature": 0,
        **fields,
    }


def lookups(server: httpx.Client) -> dict[tuple[str, str], float]:
    """How often chunks were looked up, by result and tier."""
    return {
        (sample.labels["result"], sample.labels["tier"]): sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
        if sample.name == "kvlinker:chunk_lookups_total"
    }


def test_a_corpus_of_a_builder_is_served_by_a_server_that_never_computed_it(
    processes: Processes, tmp_path: Path
) -> None:
    builder, _ = processes.start("--role", "build")
    server, _ = processes.start("--role", "serve", "--slo-tpot", "1000")
    router, _ = processes.start(
        *("--backend", url(builder), "--backend", url(server)), command="router"
    )
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, text in enumerate(TEXTS):
        (corpus / f"{number}.txt").write_text(text)
    ingested = subprocess.run(
        [KVLINKER, "ingest", str(corpus), "--url", url(router)], capture_output=True, text=True
    )
    assert ingested.returncode == 0, ingested.stderr
    ids = [each["id"] for each in router.get("/v1/context_caches").json()["data"]]
    assert len(ids) >= len(TEXTS)
    answer = router.post(CHAT, json=asked(*ids[:3]))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvlinker-replica"] == urlsplit(url(server)).netloc
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert lookups(server)["hit", "redis"] == 3
    assert ("miss", "none") not in lookups(server)
    for _ in range(4):
        assert (
            router.post(CHAT, json=asked()).headers["x-kvlinker-replica"]
            == urlsplit(url(server)).netloc
        )
    made = router.post("/v1/context_caches", json={"chunks": ["One more."]})
    assert made.headers["x-kvlinker-replica"] == urlsplit(url(builder)).netloc


def test_a_server_that_misses_a_chunk_asks_a_builder(processes: Processes) -> None:
    builder, process = processes.start("--role", "build")
    server, _ = processes.start("--builders", url(builder), "--build-tokens", "64")
    long, short = {"text": TEXTS[0]}, {"text": "It is short."}
    answer = server.post(CHAT, json=asked(documents=[long, short])).json()
    assert [each["created"] for each in answer["link"]["context_caches"]] == [True, True]
    assert lookups(server)["hit", "redis"] == 1
    assert lookups(builder) == {}
    straight, _ = processes.start()
    assert (
        answer["choices"]
        == straight.post(CHAT, json=asked(documents=[long, short])).json()["choices"]
    )
    process.send_signal(signal.SIGSTOP)  # it takes requests, and answers none
    try:
        answer = server.post(CHAT, json=asked(documents=[{"text": TEXTS[1]}]))
        assert answer.status_code == 200
    finally:
        process.kill()
    answer = server.post(CHAT, json=asked(documents=[{"text": TEXTS[2]}]))
    assert answer.status_code == 200
    assert lookups(server)["hit", "redis"] == 1, "computed here"


def test_a_builder_that_is_killed_costs_time_and_no_error(processes: Processes) -> None:
    builders = [processes.start("--role", "build") for _ in range(2)]
    server, _ = processes.start("--role", "serve")
    backends = [word for each, _ in builders for word in ("--backend", url(each))]
    router, _ = processes.start(*backends, "--backend", url(server), command="router")
    names = {urlsplit(url(each)).netloc for each, _ in builders}
    made: list[httpx.Response] = []
    for number in range(12):
        if number == 4:
            builders[0][1].kill()
        if number == 8:
            builders[1][1].kill()
        body = {"chunks": [f"Part {number} {part}. {TEXTS[part]}" for part in range(3)]}
        made.append(router.post("/v1/context_caches", json=body))
    assert [answer.status_code for answer in made] == [200] * 12
    replicas = [answer.headers["x-kvlinker-replica"] for answer in made]
    assert set(replicas[:8]) <= names
    assert set(replicas[8:]) == {urlsplit(url(server)).netloc}
    ids = [answer.json()["data"][0]["id"] for answer in made]
    for each in ids:
        assert router.post(CHAT, json=asked(each)).status_code == 200


def stopped_in_the_middle(
    builder: httpx.Client, process: subprocess.Popen[bytes], redis: RedisServer, sent: Future[Any]
) -> bool:
    """Stop a builder while it computes a chunk; returns False where it was too quick for that."""

    def busy() -> bool:
        requests: dict[str, int] = builder.get("/status").json()["requests"]
        return requests["running"] + requests["waiting"] > 0

    before = redis.client.dbsize()
    wait_until(lambda: busy() or sent.done())
    process.send_signal(signal.SIGSTOP)
    if redis.client.dbsize() == before and not sent.done():
        return True
    process.send_signal(signal.SIGCONT)
    return False


def test_a_builder_that_is_killed_while_it_computes(
    processes: Processes, redis_server: RedisServer
) -> None:
    """A server that asked it computes the chunk itself; a router has another server do it."""
    one, process = processes.start("--role", "build")
    other, other_process = processes.start("--role", "build")
    server, _ = processes.start("--builders", url(one))
    router, _ = processes.start(
        *("--backend", url(other), "--backend", url(server)), command="router"
    )

    def document(number: int) -> str:
        return f"Document {number}. " + "\n".join(TEXTS * 2)

    def killed_at(
        builder: httpx.Client,
        process: subprocess.Popen[bytes],
        ask: Callable[[str], httpx.Response],
    ) -> tuple[str, httpx.Response]:
        with ThreadPoolExecutor(1) as client:
            while True:
                text = document(next(numbers))
                sent = client.submit(ask, text)
                if stopped_in_the_middle(builder, process, redis_server, sent):
                    process.kill()
                    return text, sent.result()
                assert sent.result().status_code == 200

    numbers = itertools.count()
    text, answer = killed_at(
        one, process, lambda text: server.post(CHAT, json=asked(documents=[{"text": text}]))
    )
    assert answer.status_code == 200
    same = other.post(CHAT, json=asked(documents=[{"text": text}]))
    assert answer.json()["choices"] == same.json()["choices"]
    _, made = killed_at(
        other,
        other_process,
        lambda text: router.post("/v1/context_caches", json={"chunks": [text]}),
    )
    assert made.status_code == 200
    assert made.headers["x-kvlinker-replica"] == urlsplit(url(server)).netloc
    answer = router.post(CHAT, json=asked(made.json()["data"][0]["id"]))
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000
