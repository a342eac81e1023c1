"""Context caches are brought to memory before they are asked about."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlinker.llm import LLM
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings
from tests.waiting import wait_until

PREFETCH = "/v1/context_caches/prefetch"
TEXTS = [f"Document {number} tells of {number * 7919}. " * 5 for number in range(12)]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server whose memory is empty, behind another that has made chunks of two keys."""
    settings = tiny_settings(tmp_path, api_keys="one,two")
    one, two = ({"Authorization": f"Bearer {name}"} for name in ("one", "two"))
    with serving(LLM.from_model(tiny_model(), settings), settings, headers=one) as before:
        before.cache(*TEXTS[:9], metadata={"set": "a"})
        before.cache(TEXTS[9])
        before.post("/v1/context_caches", {"chunks": TEXTS[10:]}, headers=two)
        before.llm.store.flush()
    with serving(LLM.from_model(tiny_model(), settings), settings, headers=one) as server:
        yield server


def tiers(served: Served) -> dict[str, Any]:
    page = served.get("/v1/context_caches", params={"limit": 100, "order": "asc"}).json()
    return {each["id"]: each["tier"] for each in page["data"]}


def test_ids_are_brought_to_memory(served: Served) -> None:
    ids = list(tiers(served))
    answer = served.post(PREFETCH, {"ids": ids[:3], "by": 60})
    assert answer.status_code == 202, answer.text
    assert answer.json()["ids"] == ids[:3]
    assert answer.json()["pending"] <= 3
    wait_until(lambda: list(tiers(served).values()) == ["host"] * 3 + ["disk"] * 7)


def test_metadata_names_many(served: Served) -> None:
    answer = served.post(PREFETCH, {"metadata": {"set": "a"}})
    assert len(answer.json()["ids"]) == 9
    wait_until(lambda: list(tiers(served).values()) == ["host"] * 9 + ["disk"])


def test_calls_follow_each_other(served: Served) -> None:
    for cache_id in tiers(served):
        assert served.post(PREFETCH, {"ids": [cache_id]}).status_code == 202
    wait_until(lambda: set(tiers(served).values()) == {"host"})


def test_bad_input(served: Served) -> None:
    first = next(iter(tiers(served)))
    for body, param in (
        ({}, "ids"),
        ({"ids": [first], "metadata": {"a": "b"}}, "ids"),
        ({"ids": []}, "ids"),
        ({"ids": [first] * 1001}, "ids"),
        ({"metadata": {}}, "metadata"),
        ({"ids": [first], "by": 0}, "by"),
        ({"ids": [first], "by": 601}, "by"),
    ):
        answer = served.post(PREFETCH, body)
        assert answer.status_code == 400, (body, answer.text)
        assert answer.json()["error"]["param"] == param
    unknown = served.post(PREFETCH, {"ids": [first, "cc_unknown"]})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["param"] == "ids.1"
    others = served.post(PREFETCH, {"ids": [first]}, headers={"Authorization": "Bearer two"})
    assert others.status_code == 404
    assert set(tiers(served).values()) == {"disk"}
    assert served.get(PREFETCH).status_code == 405
