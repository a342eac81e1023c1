"""Context caches over HTTP: made, listed, changed, deleted, expired."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.doors.http.serving import MODEL_NAME, Served
from tests.waiting import wait_until

PATH = "/v1/context_caches"


@pytest.fixture(autouse=True)
def no_caches_of_others(served: Served) -> None:
    """The server is shared with tests that leave their caches behind."""
    while entries := served.get(PATH, params={"limit": 100}).json()["data"]:
        for entry in entries:
            served.http.delete(f"{PATH}/{entry['id']}")


def create(served: Served, **fields: Any) -> list[dict[str, Any]]:
    answer = served.post(PATH, fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["object"] == "list"
    entries: list[dict[str, Any]] = answer.json()["data"]
    return entries


def test_creation(served: Served) -> None:
    before = int(time.time())
    first, second = create(
        served, chunks=["The cat sat on the mat.", "A dog"], name="pets", metadata={"k": "v"}
    )
    assert (
        first["tokens"]
        == served.post("/tokenize", {"text": "The cat sat on the mat."}).json()["count"]
    )
    assert first["tokens"] > second["tokens"]
    assert before <= first["created_at"] <= time.time()
    assert first == {
        "id": first["id"],
        "object": "context_cache",
        "model": MODEL_NAME,
        "name": "pets",
        "tokens": first["tokens"],
        "bytes": first["bytes"],
        "tier": "host",
        "created_at": first["created_at"],
        "expires_at": None,
        "metadata": {"k": "v"},
        "pinned": False,
        "implicit": False,
        "contextual": False,
        "scope": "private",
        "usable": True,
    }
    assert first["id"].startswith("cc_")
    assert first["bytes"] > second["bytes"] > 0
    assert served.get(f"{PATH}/{first['id']}").json() == first


def test_same_content_is_stored_once(served: Served) -> None:
    one, two = create(served, chunks=["the same words"] * 2)
    (three,) = create(served, chunks=["the same words"])
    assert len({one["id"], two["id"], three["id"]}) == 3
    (key,) = {
        served.llm.caches.get(entry["id"], tenant="default").chunk_key
        for entry in (one, two, three)
    }
    for entry in (one, two):
        served.http.delete(f"{PATH}/{entry['id']}")
        assert served.llm.store.tier_of(key) == "host"
    served.http.delete(f"{PATH}/{three['id']}")
    assert served.llm.store.tier_of(key) is None


@pytest.mark.parametrize("context", ["alone", "bos", "prefix"])
def test_generation_context(served: Served, context: str) -> None:
    (entry,) = create(served, chunks=["a dog"], context=context)
    plain = served.post("/tokenize", {"text": "a dog"}).json()["count"]
    assert entry["tokens"] == plain + (context == "bos")
    chunk = served.llm.caches.get(entry["id"], tenant="default").chunk
    assert bool(chunk.prefix) == (context == "prefix")


def test_split_input(served: Served) -> None:
    text = "\n\n".join(f"Paragraph {number} about a cat and a dog." for number in range(6))
    entries = create(served, input=text, split={"method": "paragraph", "max_tokens": 64})
    assert len(entries) == 6
    assert all(entry["tokens"] <= 64 for entry in entries)
    passages = create(served, input=text)
    assert len(passages) == 1


@pytest.mark.parametrize(("ttl", "seconds"), [(600, 600), (0.5, 0.5), ("600s", 600), ("1.5s", 1.5)])
def test_ttl(served: Served, ttl: Any, seconds: float) -> None:
    before = time.time()
    (entry,) = create(served, chunks=["a"], ttl=ttl)
    assert before + seconds - 1 <= entry["expires_at"] <= time.time() + seconds + 1


def test_expires_at(served: Served) -> None:
    moment = int(time.time()) + 1000
    (entry,) = create(served, chunks=["a"], expires_at=moment)
    assert entry["expires_at"] == moment


def test_expired_caches_are_swept_with_their_kv(served: Served) -> None:
    (entry,) = create(served, chunks=["this one will be swept away"], ttl=1)
    key = served.llm.catalog.get(entry["id"], "default", 0.0).chunk_key  # type: ignore[union-attr]
    wait_until(lambda: served.llm.store.tier_of(key) is None)


def test_change(served: Served) -> None:
    (entry,) = create(served, chunks=["a"], ttl=1000, name="old", metadata={"a": "1"})
    url = f"{PATH}/{entry['id']}"

    def change(**fields: Any) -> dict[str, Any]:
        answer = served.http.patch(url, json=fields)
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    assert change() == entry
    assert change(name="new") == entry | {"name": "new"}
    assert change(metadata={"b": "2"})["metadata"] == {"b": "2"}
    before = time.time()
    assert before + 49 <= change(ttl="50s")["expires_at"] <= time.time() + 51
    moment = int(time.time()) + 500
    assert change(expires_at=moment)["expires_at"] == moment
    assert change(ttl=None)["expires_at"] is None
    assert change(name=None, metadata=None) | {"expires_at": 0} == entry | {
        "name": None,
        "metadata": {},
        "expires_at": 0,
    }
    assert served.get(url).json()["name"] is None


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages(served: Served, order: str) -> None:
    ids = [
        entry["id"] for entry in create(served, chunks=[f"chunk {number}" for number in range(7)])
    ]
    seen: list[str] = []
    page: dict[str, Any] = {"has_more": True}
    while page["has_more"]:
        params = {"limit": 3, "order": order} | ({"after": seen[-1]} if seen else {})
        page = served.get(PATH, params=params).json()
        listed = [entry["id"] for entry in page["data"]]
        assert (page["first_id"], page["last_id"]) == (listed[0], listed[-1])
        seen += listed
    assert seen == (ids if order == "asc" else ids[::-1])


def test_empty_list(served: Served) -> None:
    assert served.get(PATH).json() == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


def test_evicted_kv_is_seen_as_such_and_heals(served: Served) -> None:
    (entry,) = create(served, chunks=["this will be evicted from all tiers"])
    parts = [{"type": "context_cache", "id": entry["id"]}, {"type": "text", "text": "So?"}]
    ask = {"prompt": parts, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    before = served.post("/v1/completions", ask).json()
    record = served.llm.catalog.get(entry["id"], "default", time.time())
    assert record is not None
    served.llm.store.delete(record.chunk_key)
    assert served.get(f"{PATH}/{entry['id']}").json() == entry | {"bytes": 0, "tier": None}
    after = served.post("/v1/completions", ask).json()
    assert after["choices"] == before["choices"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, (
        "it was computed for this request"
    )
    assert served.get(f"{PATH}/{entry['id']}").json() == entry
    again = served.post("/v1/completions", ask).json()
    assert (again["choices"], again["usage"]) == (before["choices"], before["usage"])
