"""Requests say which workflow they are of, and what it uses next, in every API."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvlinker.base.errors import InvalidRequestError
from kvlinker.llm import LLM
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings
from tests.waiting import wait_until

TEXTS = [f"Document {number} tells of {12345 + number * 7919}. " * 5 for number in range(6)]
ONE, TWO = ({"Authorization": f"Bearer {name}"} for name in ("one", "two"))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server with room in memory for three of six chunks, which are all on disk."""
    settings = tiny_settings(tmp_path, api_keys="one,two", host_memory=1 << 30)
    with serving(LLM.from_model(tiny_model(), settings), settings, headers=ONE) as before:
        caches = [before.cache(text) for text in TEXTS]
        nbytes = max(tier.used_bytes for tier in before.llm.tiers() if tier.name == "host")
        before.llm.store.flush()
    assert len(caches) == len(TEXTS)
    settings = tiny_settings(tmp_path, api_keys="one,two", host_memory=nbytes * 7 // 12)
    with serving(LLM.from_model(tiny_model(), settings), settings, headers=ONE) as server:
        yield server


def ids_of(served: Served) -> list[str]:
    page = served.get("/v1/context_caches", params={"limit": 100, "order": "asc"}).json()
    return [each["id"] for each in page["data"]]


def is_in_memory(served: Served, numbers: set[int]) -> bool:
    page = served.get("/v1/context_caches", params={"limit": 100, "order": "asc"}).json()
    found = {number for number, each in enumerate(page["data"]) if each["tier"] == "host"}
    return found == numbers


def content(id: str) -> list[dict[str, Any]]:
    return [{"type": "context_cache", "id": id}, {"type": "text", "text": "What?"}]


def ask(served: Served, id: str, link: dict[str, Any]) -> Any:
    body = {"messages": [{"role": "user", "content": content(id)}], "max_tokens": 1, "link": link}
    return served.post("/v1/chat/completions", body)


def test_a_plain_request_builds_nothing_for_agents(served: Served) -> None:
    ids = ids_of(served)
    assert ask(served, ids[0], {"policy": "naive"}).status_code == 200
    assert served.llm._agents is None
    assert ask(served, ids[0], {"workflow": "f"}).status_code == 200
    assert served.llm._agents is not None


def test_a_router_that_asks_what_is_here_builds_nothing_for_agents(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    with serving(LLM.from_model(tiny_model(), settings), settings) as server:
        assert server.get("/v1/residency").json()["pending"] == 0
        assert server.llm._agents is None


def test_what_comes_next_is_brought_and_stays(served: Served) -> None:
    ids = ids_of(served)
    uses = [{"ids": [ids[5]], "steps": 1}, {"ids": [ids[4]], "steps": 2}]
    assert ask(served, ids[0], {"workflow": "f", "next": uses}).status_code == 200
    wait_until(partial(is_in_memory, served, {0, 4, 5}))
    for number in (1, 2, 3):
        assert ask(served, ids[number], {"workflow": "g"}).status_code == 200
        wait_until(partial(is_in_memory, served, {number, 4, 5}))
    assert "kvlinker:evictions_spared_total" in served.get("/metrics").text


def test_what_comes_next_is_brought_where_the_request_before_held_all_room(
    tmp_path: Path,
) -> None:
    """It begins while that request has its own chunks in memory, and goes on when it has ended."""
    settings = tiny_settings(tmp_path, host_memory=1 << 30)
    with serving(LLM.from_model(tiny_model(), settings), settings) as before:
        before.cache(*TEXTS[:2])
        nbytes = max(tier.used_bytes for tier in before.llm.tiers() if tier.name == "host")
        before.llm.store.flush()
    settings = tiny_settings(tmp_path, host_memory=nbytes * 3 // 4)
    with serving(LLM.from_model(tiny_model(), settings), settings) as server:
        first, second = ids_of(server)
        for id, other, number in ((first, second, 1), (second, first, 0)):
            link = {"workflow": "f", "next": [{"ids": [other], "steps": 1}]}
            assert ask(server, id, link).status_code == 200
            wait_until(partial(is_in_memory, server, {number}))


def test_what_comes_next_is_brought_from_a_shared_tier(tmp_path: Path) -> None:
    """Another server has made the chunks; here they are neither in memory nor on disk."""
    options: dict[str, Any] = {"object_url": f"file://{tmp_path}/objects", "disk_space": 0}
    settings = tiny_settings(tmp_path, **options)
    with serving(LLM.from_model(tiny_model(), settings), settings) as before:
        before.cache(*TEXTS[:3])
        before.llm.store.flush()
    with serving(LLM.from_model(tiny_model(), settings), settings) as server:
        ids = ids_of(server)
        page = server.get("/v1/context_caches", params={"limit": 100, "order": "asc"}).json()
        assert {each["tier"] for each in page["data"]} == {"object"}
        link = {"workflow": "f", "next": [{"ids": [ids[2]], "steps": 1}]}
        assert ask(server, ids[0], link).status_code == 200
        wait_until(partial(is_in_memory, server, {0, 2}))


def test_hints_count_as_no_use(served: Served) -> None:
    """What lives from its last use on lives no longer for being named."""
    marked = {"type": "text", "text": TEXTS[0] * 2, "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [marked, {"type": "text", "text": "What?"}]}
    answer = served.post("/v1/chat/completions", {"messages": [message], "max_tokens": 1}).json()
    (made,) = answer["link"]["context_caches"]
    path = f"/v1/context_caches/{made['id']}"
    before = served.get(path).json()
    link = {"workflow": "f", "next": [{"ids": [made["id"]], "seconds": 5}]}
    assert ask(served, ids_of(served)[0], link).status_code == 200
    body = {"ids": [made["id"]]}
    assert served.post("/v1/context_caches/prefetch", body).status_code in (200, 202)
    wait_until(lambda: served.llm.agents.preloading.pending == 0)
    assert served.get(path).json() == before | {"tier": served.get(path).json()["tier"]}


def test_every_api_takes_it(served: Served) -> None:
    ids = ids_of(served)
    link = {"workflow": "f", "next": [{"ids": [ids[1]], "seconds": 5}]}
    parts = content(ids[0])
    message = [{"role": "user", "content": parts}]
    for path, body in (
        ("/v1/chat/completions", {"messages": message, "max_tokens": 1}),
        ("/v1/completions", {"prompt": parts, "max_tokens": 1}),
        ("/v1/messages", {"messages": message, "max_tokens": 1}),
        ("/v1/responses", {"input": message, "max_output_tokens": 1}),
    ):
        answer = served.post(path, body | {"link": link})
        assert answer.status_code == 200, (path, answer.text)
        refused = served.post(
            path, body | {"link": {"workflow": "f", "next": [{"ids": ["cc_no"], "steps": 1}]}}
        )
        assert refused.status_code == 400, (path, refused.text)
        assert "link.next.0.ids.0" in refused.text or path == "/v1/messages"


def test_bad_input(served: Served) -> None:
    (first, *_) = ids_of(served)
    use = {"ids": [first], "steps": 1}
    for link, param in (
        ({"next": [use]}, "link.next"),
        ({"workflow": ""}, "link.workflow"),
        ({"workflow": "x" * 257}, "link.workflow"),
        ({"workflow": "f", "next": [use] * 10_000}, "link.next"),
        ({"workflow": "f", "next": [use | {"steps": -1}]}, "link.next.0.steps"),
        ({"workflow": "f", "next": [use | {"steps": 1.5}]}, "link.next.0.steps"),
        ({"workflow": "f", "next": [{"ids": [first], "seconds": 3601}]}, "link.next.0.seconds"),
        ({"workflow": "f", "next": [{"ids": [first]}]}, "link.next"),
        ({"workflow": "f", "next": [use | {"seconds": 1}]}, "link.next"),
        ({"workflow": "f", "next": [{"ids": [], "steps": 1}]}, "link.next.0.ids"),
        ({"workflow": "f", "next": [use, {"ids": ["cc_no"], "steps": 1}]}, "link.next.1.ids.0"),
    ):
        answer = ask(served, first, link)
        assert answer.status_code == 400, (link, answer.text)
        assert answer.json()["error"]["param"] == param
    others = served.post(
        "/v1/completions",
        {"prompt": "x", "max_tokens": 1, "link": {"workflow": "f", "next": [use]}},
        headers=TWO,
    )
    assert others.status_code == 400
    assert others.json()["error"]["param"] == "link.next.0.ids.0"


def test_the_library_takes_it(served: Served) -> None:
    llm = served.llm
    text = llm.generate_context_cache(["Apples are red and round fruit."])[0]
    answer = llm.chat_completion(
        [{"role": "user", "content": "x"}],
        max_tokens=1,
        workflow="f",
        next=[{"ids": [text.id], "steps": 1}],
    )
    assert answer.usage.output_tokens == 1
    assert llm.store.next_uses.due(text.chunk_key) < float("inf")


def test_the_library_refuses_an_order_that_is_none(served: Served) -> None:
    message = [{"role": "user", "content": "x"}]
    order: Any = "any order"
    with pytest.raises(InvalidRequestError, match="'order' is 'any order'"):
        served.llm.chat_completion(message, max_tokens=1, order=order)
