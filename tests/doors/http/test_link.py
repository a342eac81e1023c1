"""Policies and explanations over HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvlinker.linking import known_policies
from tests.doors.http.serving import MODEL_NAME, Served

TEXTS = (
    "the first chunk of this text, about plums",
    "and the second one, which speaks of pears and more pears",
)


def messages(*ids: str) -> list[dict[str, Any]]:
    parts = [{"type": "context_cache", "id": cache_id} for cache_id in ids]
    return [
        {
            "role": "user",
            "content": [*parts, {"type": "text", "text": "What do the two have in common?"}],
        }
    ]


def test_all_policies_are_listed_with_their_parameters(served: Served) -> None:
    answer = served.get("/v1/policies").json()
    assert (answer["object"], answer["default"]) == ("list", "legolink-4")
    listed = {entry["name"]: entry for entry in answer["data"]}
    assert list(listed) == list(known_policies())
    assert listed["legolink"]["usage"] == "legolink-<tokens, 1 to 4096>"
    assert listed["legolink"]["parameters"][0] == {
        "name": "tokens",
        "meaning": "tokens",
        "type": "integer",
        "minimum": 1,
        "maximum": 4096,
        "prefix": "",
        "default": None,
    }
    assert listed["cacheblend"]["parameters"][1]["values"] == ["gradual", "onestep"]
    assert all(entry["object"] == "policy" and entry["description"] for entry in listed.values())
    assert all(entry["supported"] and entry["restriction"] is None for entry in listed.values())


@pytest.mark.parametrize(
    "policy",
    [
        "naive",
        "legolink-3",
        "cacheblend-20",
        "cachecraft-1-focus-w1",
        "query-10",
        "h2o-20",
        "query-5+legolink-1",
    ],
)
def test_an_explanation_tells_what_a_completion_does(served: Served, policy: str) -> None:
    first, second = served.cache(*TEXTS)
    body = {"messages": messages(second, first), "link": {"policy": policy}}
    explained = served.post("/v1/link/explain", body).json()
    answer = served.post("/v1/chat/completions", body | {"max_tokens": 1}).json()
    details = answer["usage"]["prompt_tokens_details"]
    cost = explained["cost"]
    assert details.pop("exact_cached_tokens") == 0, "an explanation reuses nothing"
    assert details.pop("reusable_tokens") == 0, "ids are known, and nothing else comes again"
    assert {name: cost[name] for name in details} == details
    assert explained["tokens"] == answer["usage"]["prompt_tokens"]
    assert (explained["object"], explained["policy"], explained["model"]) == (
        "link.explanation",
        policy,
        MODEL_NAME,
    )
    chunks = [segment for segment in explained["segments"] if segment["type"] == "chunk"]
    assert [chunk["context_cache"] for chunk in chunks] == [second, first]
    assert [chunk["exact"] for chunk in chunks] == [True, False]
    assert explained["segments"][0]["start"] == 0
    for one, next_one in zip(explained["segments"], explained["segments"][1:], strict=False):
        assert one["end"] == next_one["start"]
    assert explained["layers"][0]["first"] == 0
    assert explained["layers"][-1]["last"] == 1
    recomputed = sum(
        layer["recomputed_tokens"] * (layer["last"] - layer["first"] + 1)
        for layer in explained["layers"]
    )
    assert round(recomputed / 2) == cost["recomputed_tokens"]
    for layer in explained["layers"]:
        assert all(
            chunks[0]["start"] <= begin < end <= chunks[1]["end"]
            for begin, end in layer["recomputed"]
        )
    assert 0 < cost["flops"] < 2 * cost["full_flops"]
    for score in explained["scores"]:
        expected = len(chunks) if score["of"] == "chunks" else len(score["positions"])
        assert len(score["values"]) == expected


def streamed(served: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = served.post("/v1/chat/completions", body | {"stream": True}).text.split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("policy", ["naive", "cacheblend-20", "query-10"])
def test_an_answer_explains_its_own_prompt(served: Served, policy: str) -> None:
    first, second = served.cache(*TEXTS)
    link = {"policy": policy, "attention": True}
    asked = {"messages": messages(second, first)}
    explained = served.post("/v1/link/explain", {**asked, "link": link}).json()
    assert explained.pop("model") == MODEL_NAME
    body = {**asked, "max_tokens": 2, "link": {**link, "explain": True}}
    answer = served.post("/v1/chat/completions", body).json()["link"]
    assert answer["explanation"] == explained
    assert [cache["id"] for cache in answer["context_caches"]] == [second, first]
    told = [chunk["link"] for chunk in streamed(served, body) if "link" in chunk]
    assert [("explanation" in link, link["policy"]) for link in told] == [
        (False, policy),
        (True, policy),
    ]
    assert told[1]["explanation"] == explained
    assert explained["token_ids"] == served.post("/tokenize", asked).json()["tokens"]
    assert TEXTS[1] + TEXTS[0] in "".join(explained["token_texts"])
    assert len(explained["token_texts"]) == len(explained["attention"][1]) == explained["tokens"]


def test_an_answer_without_chunks_is_explained_where_that_is_asked_for(served: Served) -> None:
    body = {"prompt": "nothing is cached here", "max_tokens": 1}
    assert "link" not in served.post("/v1/completions", body).json()
    link = served.post("/v1/completions", body | {"link": {"explain": True}}).json()["link"]
    assert link["context_caches"] == []
    assert link["explanation"]["fresh"] == [[0, link["explanation"]["tokens"]]]
    assert link["explanation"]["attention"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/chat/completions",
            {"messages": messages(), "link": {"attention": True}},
            "link.attention",
        ),
        ("/v1/completions", {"prompt": ["one", "two"], "link": {"explain": True}}, "link.explain"),
        ("/v1/responses", {"input": "hello", "link": {"explain": True}}, "link.explain"),
    ],
)
def test_where_nothing_can_be_explained_that_is_refused(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    answer = served.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_scores_say_why(served: Served) -> None:
    first, second = served.cache(*TEXTS)
    body = {"messages": messages(second, first), "link": {"policy": "query-10"}}
    explained = served.post("/v1/link/explain", body).json()
    (score,) = explained["scores"]
    (layer,) = explained["layers"]
    by_position = dict(zip(score["positions"], score["values"], strict=True))
    chosen = {position for begin, end in layer["recomputed"] for position in range(begin, end)}
    assert min(by_position[p] for p in chosen) >= max(
        v for p, v in by_position.items() if p not in chosen
    )


def test_a_completions_prompt_can_be_explained(served: Served) -> None:
    (first,) = served.cache(TEXTS[0])
    prompt = [{"type": "text", "text": "So: "}, {"type": "context_cache", "id": first}]
    explained = served.post(
        "/v1/link/explain", {"prompt": prompt, "link": {"policy": "naive"}}
    ).json()
    assert [segment["type"] for segment in explained["segments"]] == ["fresh", "chunk"]
    assert explained["segments"][1]["context_cache"] == first
    without = served.post("/v1/link/explain", {"prompt": "nothing is cached here"}).json()
    assert without["cost"]["cached_tokens"] == without["cost"]["recomputed_tokens"] == 0


BAD_REQUESTS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "invalid_value"),
    ({"messages": messages(), "prompt": "both"}, "messages", "invalid_value"),
    ({"prompt": ["one", "two"]}, "prompt", "invalid_value"),
    (
        {"messages": messages("cc_unknown")},
        "messages.0.content.0.id",
        "context_cache_not_found",
    ),
    ({"prompt": "x", "link": {"policy": "nonsense"}}, "link.policy", "invalid_policy"),
    ({"prompt": "x", "link": {"policy": "query-101"}}, "link.policy", "invalid_policy"),
    (
        {"prompt": "x", "link": {"policy": "cachecraft-1-focus-w0"}},
        "link.policy",
        "invalid_policy",
    ),
    ({"prompt": "x" * 5000}, "prompt", "context_length_exceeded"),
    ({"prompt": "x", "max_tokens": 3}, "max_tokens", "unknown_parameter"),
]


def test_bad_requests_are_answered_with_the_parameter(
    served: Served, subtests: pytest.Subtests
) -> None:
    for body, param, code in BAD_REQUESTS:
        with subtests.test(param, body=body):
            answer = served.post("/v1/link/explain", body)
            assert 400 <= answer.status_code < 500
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == (param, code)


def test_an_out_of_range_parameter_is_answered_with_the_range(served: Served) -> None:
    error = served.post(
        "/v1/link/explain", {"prompt": "x", "link": {"policy": "query-101"}}
    ).json()["error"]
    assert "101" in error["message"]
    assert "from 0 to 100" in error["message"]
