"""Two servers behind a balancer: a catalog in PostgreSQL, and chunks in Redis, make them one, but
for what each of them has in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvlinker.llm import LLM
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings
from tests.postgres_server import PostgresServer
from tests.redis_server import RedisServer
from tests.waiting import wait_until

CACHES = "/v1/context_caches"
TEXTS = [f"Document {n} says that the code of its door is {n * 7919}." for n in range(1, 5)]


class Fleet:
    """Two servers, each with a state directory of its own."""

    def __init__(self, catalog_url: str, folder: Path, **options: Any) -> None:
        self._stack = ExitStack()
        self.servers: list[Served] = []
        for number in range(2):
            settings = tiny_settings(
                folder / str(number), catalog_url=catalog_url, policy="legolink-4", **options
            )
            llm = LLM.from_model(tiny_model(), settings)
            self.servers.append(self._stack.enter_context(serving(llm, settings)))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def balanced(self, number: int) -> Served:
        return self.servers[number % 2]


@pytest.fixture
def fleet(
    postgres_server: PostgresServer, redis_server: RedisServer, tmp_path: Path
) -> Iterator[Fleet]:
    with Fleet(postgres_server.new_database(), tmp_path, redis_url=redis_server.url) as fleet:
        yield fleet


def chat(server: Served, *parts: object, **options: Any) -> Any:
    content = [
        {"type": "context_cache", "id": part} if str(part).startswith("cc_") else part
        for part in parts
    ]
    return server.post(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [*content, {"type": "text", "text": "?"}]}],
            "max_tokens": 4,
            "temperature": 0,
            **options,
        },
    )


def test_an_id_is_good_everywhere(fleet: Fleet) -> None:
    ids = [fleet.balanced(n).cache(text)[0] for n, text in enumerate(TEXTS)]
    assert {fleet.balanced(n).get(f"{CACHES}/{ids[0]}").status_code for n in range(4)} == {200}
    answers = [chat(fleet.balanced(n), *ids) for n in range(4)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1


def test_lists_pages_searches_and_sums_are_alike(fleet: Fleet) -> None:
    for n, text in enumerate(TEXTS):
        fleet.balanced(n).cache(text, metadata={"p": "x"})
    for server in fleet.servers:
        server.llm.caches.sweep()  # indexes what others created, as each server does now and then
    seen = [
        [
            server.get(CACHES, params={"limit": 3}).json(),
            server.get(CACHES, params={"metadata[p]": "x"}).json(),
            server.post(f"{CACHES}/search", {"query": "document door 7919"}).json(),
            server.get(f"{CACHES}/usage").json()["caches"],
        ]
        for server in fleet.servers
    ]
    for one, other in zip(*seen, strict=True):
        assert without_tiers(one) == without_tiers(other)
    last = seen[0][0]["last_id"]
    page = fleet.servers[1].get(CACHES, params={"limit": 3, "after": last}).json()
    assert len(page["data"]) == 1


def without_tiers(answer: Any) -> Any:
    """An answer without where each server has the chunks, and in how many bytes."""
    if not isinstance(answer, dict):
        return answer
    return [
        {key: value for key, value in each.items() if key not in ("tier", "bytes")}
        for each in answer["data"]
    ]


def test_a_quota_is_one_quota(postgres_server: PostgresServer, tmp_path: Path) -> None:
    with (
        Fleet(postgres_server.new_database(), tmp_path, tenant_quota_caches=5) as fleet,
        ThreadPoolExecutor(8) as clients,
    ):
        answers = list(
            clients.map(
                lambda n: fleet.balanced(n).post(CACHES, {"chunks": [f"Text {n}."]}).status_code,
                range(20),
            )
        )
        assert (answers.count(200), answers.count(403)) == (5, 15)
        assert fleet.servers[1].get(f"{CACHES}/usage").json()["caches"] == 5


def test_what_one_deletes_is_gone_from_the_other(fleet: Fleet) -> None:
    one, other = fleet.servers
    (kept,) = one.cache(TEXTS[0])
    assert chat(other, kept).status_code == 200
    assert other.llm.store.keys()
    assert one.http.delete(f"{CACHES}/{kept}").status_code == 200
    assert other.get(f"{CACHES}/{kept}").status_code == 404
    assert chat(other, kept).status_code == 404
    other.llm.caches.sweep()
    assert not other.llm.store.keys()


def test_a_document_is_entered_once_and_its_kv_is_computed_once(fleet: Fleet) -> None:
    one, other = fleet.servers
    asked = {"documents": [{"text": TEXTS[0] * 20}]}
    first = chat(one, **asked).json()
    one.llm.store.flush()
    second = chat(other, **asked).json()
    (entered,), (found,) = (answer["link"]["context_caches"] for answer in (first, second))
    assert (entered["created"], found["created"]) == (True, False)
    assert entered["id"] == found["id"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_pins_are_one_sum(fleet: Fleet) -> None:
    fleet.servers[0].cache(TEXTS[0], pinned=True)
    sums = [s.get(f"{CACHES}/usage").json()["pinned_bytes"] for s in fleet.servers]
    assert sums[0] == sums[1] > 0


@pytest.mark.whole
@pytest.mark.parametrize("ends", [True, False], ids=["killed", "hangs"])
def test_without_the_catalog_ids_are_503_and_texts_are_answered(tmp_path: Path, ends: bool) -> None:
    postgres = PostgresServer()
    try:
        with Fleet(postgres.new_database(), tmp_path / "state", implicit="auto") as fleet:
            server = fleet.servers[0]
            (kept,) = server.cache(TEXTS[0])
            document = {"documents": [{"text": TEXTS[1] * 10}]}
            before = chat(server, link={"policy": "full"}, **document).json()
            (postgres.kill if ends else postgres.hang)()
            began = time.monotonic()
            for asked in (chat(server, kept), server.get(f"{CACHES}/{kept}"), server.get(CACHES)):
                assert asked.status_code == 503, asked.text
                assert asked.json()["error"]["code"] == "catalog_unavailable"
                assert int(asked.headers["Retry-After"]) > 0
            assert time.monotonic() - began < 15
            for options in ({}, document, {"link": {"policy": "prefix"}}):
                assert chat(server, **options).status_code == 200
            answer = chat(server, **document).json()
            assert answer["choices"] == before["choices"]
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            (postgres.start if ends else postgres.go_on)()
            wait_until(lambda: chat(server, kept).status_code == 200)
            assert chat(server, **document).json()["link"]["context_caches"]
    finally:
        if not ends:
            postgres.go_on()
        postgres.remove()
