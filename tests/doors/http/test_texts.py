"""Texts of context caches over HTTP: reading one, searching all, and splitting without caching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvlinker import Client
from kvlinker.base.errors import ContextCacheNotFoundError, InvalidRequestError
from kvlinker.base.types.limits import MAX_INPUT_CHARACTERS
from kvlinker.llm import LLM
from tests.doors.http.serving import Served, tiny_model, tiny_settings

PATH = "/v1/context_caches"
ALPHA = {"Authorization": "Bearer key-alpha"}
BETA = {"Authorization": "Bearer key-beta"}
TEXTS = (
    "The cat sat on the mat.\n",
    "A dog\tbarked: “wuff” <|end|> at the cat and the cat.",
    "Numbers 1 2 3",
)


def search(
    served: Served, query: str, *, headers: dict[str, str] | None = None, **fields: Any
) -> list[dict[str, Any]]:
    answer = served.post(f"{PATH}/search", {"query": query, **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


@pytest.mark.parametrize("context", ["alone", "bos", "prefix"])
def test_content_is_the_text(served: Served, context: str) -> None:
    ids = served.cache(*TEXTS, context=context, metadata={"k": "v"})
    for cache_id, text in zip(ids, TEXTS, strict=True):
        content = served.get(f"{PATH}/{cache_id}/content").json()
        assert content["text"] == text
        assert len(content["token_ids"]) == served.get(f"{PATH}/{cache_id}").json()["tokens"]
        assert (content["id"], content["metadata"]) == (cache_id, {"k": "v"})


def test_content_of_none(served: Served, keyed: Served) -> None:
    assert (
        served.get(f"{PATH}/cc_unknown/content").json()["error"]["code"]
        == "context_cache_not_found"
    )
    cache_id = keyed.post(PATH, {"chunks": ["alpha's"]}, headers=ALPHA).json()["data"][0]["id"]
    assert keyed.get(f"{PATH}/{cache_id}/content", headers=ALPHA).json()["text"] == "alpha's"
    refused = keyed.get(f"{PATH}/{cache_id}/content", headers=BETA)
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "id")


def test_search(served: Served) -> None:
    ids = served.cache(*TEXTS, metadata=[{"page": str(page), "run": "search"} for page in range(3)])
    mine = {"metadata": {"run": "search"}}
    found = search(served, "Where are CATS?", **mine)
    assert sorted(hit["id"] for hit in found) == sorted(ids[:2])
    assert found[0]["score"] > found[1]["score"] > 0
    assert {hit["text"] for hit in found} == set(TEXTS[:2])
    assert [hit["metadata"]["page"] for hit in search(served, '"NEAR(numbers" OR', **mine)] == ["2"]
    assert len(search(served, "cat", limit=1, **mine)) == 1
    assert search(served, "Where are CATS?", limit=None, scope=None, **mine) == found
    assert search(served, "cat", metadata={"run": "another"}) == []
    served.http.delete(f"{PATH}/{ids[0]}")
    assert [hit["id"] for hit in search(served, "cat", **mine)] == [ids[1]]


def test_search_of_tenants(keyed: Served) -> None:
    keyed.post(PATH, {"chunks": ["alpha's zebra"]}, headers=ALPHA)
    assert [hit["text"] for hit in search(keyed, "zebra", headers=ALPHA)] == ["alpha's zebra"]
    assert search(keyed, "zebra", headers=BETA) == []
    assert search(keyed, "zebra", headers=ALPHA, scope="shared") == []
    keyed.llm.generate_context_cache(["everybody's zebra"], scope="shared")
    for headers in (ALPHA, BETA):
        assert [hit["text"] for hit in search(keyed, "zebra", headers=headers, scope="shared")] == [
            "everybody's zebra"
        ]
    assert search(keyed, "zebra", headers=BETA) == []


BAD_SEARCHES: list[tuple[dict[str, Any], str]] = [
    ({}, "query"),
    ({"query": ""}, "query"),
    ({"query": "?!"}, "query"),
    ({"query": "a" * 10_001}, "query"),
    ({"query": 3}, "query"),
    ({"query": "cat", "limit": 0}, "limit"),
    ({"query": "cat", "limit": 101}, "limit"),
    ({"query": "cat", "metadata": {"k": 1}}, "metadata.k"),
    ({"query": "cat", "scope": "all"}, "scope"),
    ({"query": "cat", "metadata": []}, "metadata"),
    ({"query": "cat", "unknown": 1}, "unknown"),
]


def test_bad_search(served: Served, subtests: pytest.Subtests) -> None:
    for body, param in BAD_SEARCHES:
        with subtests.test(param, body=body):
            answer = served.post(f"{PATH}/search", body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (
                answer.text
            )


def test_a_long_query_is_refused_by_its_characters(served: Served) -> None:
    refused = served.post(f"{PATH}/search", {"query": "a" * 10_001})
    assert "at most 10000 characters" in refused.json()["error"]["message"]


def test_metadata_for_each_chunk(served: Served) -> None:
    refused = served.post(PATH, {"chunks": ["one", "two"], "metadata": [{"n": "1"}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metadata")
    refused = served.post(PATH, {"input": "one", "metadata": [{"n": "1"}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metadata")
    refused = served.post(PATH, {"chunks": ["one", "two"], "metadata": [{"n": "1"}, {"n": 2}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metadata.1.n")
    ids = served.cache("one", "two", metadata=[{"n": "1"}, {"n": "2"}])
    assert [served.get(f"{PATH}/{cache_id}").json()["metadata"] for cache_id in ids] == [
        {"n": "1"},
        {"n": "2"},
    ]


def test_split(served: Served) -> None:
    text = "Ärger & Öl 🦊.\n\n" + "word " * 40
    pieces = served.post(f"{PATH}/split", {"input": text, "split": {"max_tokens": 16}}).json()[
        "data"
    ]
    assert len(pieces) > 2
    assert "".join(text[piece["start"] : piece["end"]] for piece in pieces) == text
    assert all(0 < piece["tokens"] <= 16 for piece in pieces)
    assert served.post(f"{PATH}/split", {"input": "one", "split": None}).json()["data"] == [
        {"start": 0, "end": 3, "tokens": served.llm.split_pieces("one")[0].tokens}
    ]
    for body, param in (
        ({"input": " "}, "input"),
        ({"input": "a" * (MAX_INPUT_CHARACTERS + 1)}, "input"),
        ({"input": "a", "split": {"method": "x"}}, "split.method"),
    ):
        answer = served.post(f"{PATH}/split", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_client(served: Served) -> None:
    with Client(served.url) as client:
        pieces = client.split_text("A fox ran.\n\nA hen sat.", method="paragraph")
        assert [piece.text for piece in pieces] == ["A fox ran.\n\n", "A hen sat."]
        caches = client.generate_context_cache(
            [piece.text for piece in pieces],
            metadata=[{"start": str(piece.start)} for piece in pieces],
        )
        (hit,) = client.search("hen", metadata={"start": "12"})
        assert (hit.id, hit.text, hit.tokens) == (caches[1].id, "A hen sat.", pieces[1].tokens)
        assert client.read_cache(hit.id).text == "A hen sat."
        answer = client.chat_completion([{"role": "user", "content": [hit, "So?"]}], max_tokens=1)
        assert answer.usage.cached_tokens + answer.usage.recomputed_tokens == hit.tokens
        with pytest.raises(ContextCacheNotFoundError):
            client.read_cache("cc_unknown")
        with pytest.raises(InvalidRequestError, match="no word"):
            client.search("?")
        status = client.server_status()
        told = status["disk_codec"], status["kv_bytes_per_token"], status["kv_bytes_per_chunk"]
        assert told == ("raw", served.llm.engine.kv_bytes_per_token, 0)
        assert status["steps"] == served.llm.engine.computes_steps


def test_search_in_the_process(served: Served) -> None:
    llm = served.llm
    (cache,) = llm.generate_context_cache(["An owl sleeps."])
    (hit,) = llm.search("owls")
    assert (hit.id, llm.read_cache(hit.id).token_ids) == (cache.id, cache.chunk.tokens)
    answer = llm.chat_completion([{"role": "user", "content": [hit, "So?"]}], max_tokens=1)
    assert answer.usage.cached_tokens + answer.usage.recomputed_tokens == hit.tokens


def state_bytes(state: Path) -> bytes:
    return b"".join(path.read_bytes() for path in state.glob("catalog.sqlite*"))


def test_search_switched_off_and_on(tmp_path: Path) -> None:
    """What was cached meanwhile is found once search is on; no text stays where it is off."""
    with LLM.from_model(tiny_model(), tiny_settings(tmp_path)) as llm:
        llm.generate_context_cache(["A platypus swims."])
        assert len(llm.search("platypus")) == 1
    assert b"platypus" in state_bytes(tmp_path)
    with LLM.from_model(tiny_model(), tiny_settings(tmp_path, search="off")) as llm:
        llm.generate_context_cache(["A platypus sleeps."])
        with pytest.raises(InvalidRequestError, match="search=on") as caught:
            llm.search("platypus")
        assert caught.value.code == "search_off"
    assert b"platypus" not in state_bytes(tmp_path)
    with LLM.from_model(tiny_model(), tiny_settings(tmp_path)) as llm:
        assert len(llm.search("platypus")) == 2


def test_search_with_encryption(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    key = "00112233445566778899aabbccddeeff" * 2
    with LLM.from_model(tiny_model(), tiny_settings(tmp_path, encryption_key=key)) as llm:
        (cache,) = llm.generate_context_cache(["A platypus swims."])
        assert llm.read_cache(cache).text == "A platypus swims."
        with pytest.raises(InvalidRequestError, match="Search is off"):
            llm.search("platypus")
    assert b"platypus" not in state_bytes(tmp_path)
    with LLM.from_model(
        tiny_model(), tiny_settings(tmp_path, encryption_key=key, search="on")
    ) as llm:
        assert [hit.id for hit in llm.search("platypus")] == [cache.id]
