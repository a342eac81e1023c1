"""A conversation over HTTP: each turn says what it reused of those before it, and its answer is the
same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvlinker.llm import LLM
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings

QUESTIONS = [
    "What is the first word of the note?",
    "And what comes behind it?",
    "Say all of it once more.",
]


@pytest.fixture(scope="module", params=["on", "off"])
def talking(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, bool]]:
    """A server, and whether it reuses prefixes."""
    settings = tiny_settings(tmp_path_factory.mktemp("state"), prefix_cache=request.param)
    with serving(LLM.from_model(tiny_model(), settings), settings) as running:
        yield running, request.param == "on"


def turn(served: Served, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 6, "temperature": 0} | options
    response = served.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def conversation(
    served: Served, content: Any, policy: str
) -> tuple[list[str], list[dict[str, int]]]:
    """The answers to all questions, each behind those before it, and what was reused for them."""
    messages: list[dict[str, Any]] = []
    answers, details = [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": [*content, {"type": "text", "text": question}]})
        content = []
        answer = turn(served, messages, link={"policy": policy})
        answers.append(answer["choices"][0]["message"]["content"])
        usage = answer["usage"]
        details.append(usage["prompt_tokens_details"] | {"prompt_tokens": usage["prompt_tokens"]})
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers, details


ANSWERS: dict[str, list[str]] = {}


@pytest.mark.parametrize("policy", ["full", "legolink-4", "query-10"])
def test_turns_reuse_those_before_them(talking: tuple[Served, bool], policy: str) -> None:
    served, reuses = talking
    texts = [f"A note for {policy}. " * 8, "Another one. " * 6]
    created = served.http.post("/v1/context_caches", json={"chunks": texts})
    parts = [{"type": "context_cache", "id": entry["id"]} for entry in created.json()["data"]]
    answers, details = conversation(served, parts, policy)
    assert answers == ANSWERS.setdefault(policy, answers), "reuse changes no answer"
    for before, after in pairwise(details):
        if reuses:
            assert after["exact_cached_tokens"] >= before["prompt_tokens"] - 8, "all but the seam"
            assert after["recomputed_tokens"] == 0
            assert after["exact_cached_tokens"] <= after["cached_tokens"] < after["prompt_tokens"]
        else:
            assert after["exact_cached_tokens"] == 0


def test_metrics_tell_what_was_reused(talking: tuple[Served, bool]) -> None:
    served, reuses = talking
    for _ in range(2):
        turn(served, [{"role": "user", "content": "Something that is asked twice, word for word."}])
    lines = served.http.get("/metrics").text.splitlines()
    figures = dict(line.rsplit(" ", 1) for line in lines if line.startswith("kvlinker:"))
    assert (float(figures["kvlinker:exact_cached_tokens_total"]) > 0) == reuses
    assert (float(figures["kvlinker:kv_slots_kept"]) > 0) == reuses
    assert float(figures["kvlinker:kv_slots_used"]) == 0


def test_streams_tell_it_too(talking: tuple[Served, bool]) -> None:
    served, reuses = talking
    body = {
        "messages": [
            {"role": "user", "content": "A question that is streamed, and streamed once more."}
        ],
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    texts = [served.http.post("/v1/chat/completions", json=body).text for _ in range(2)]
    assert '"exact_cached_tokens":0' in texts[0].replace(" ", "")
    assert ('"exact_cached_tokens":0' in texts[1].replace(" ", "")) != reuses


def test_other_tenants_reuse_nothing(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, prefix_cache="on", api_keys="one,two")
    messages = [
        {"role": "user", "content": "The same question from two who do not know each other."}
    ]
    with serving(LLM.from_model(tiny_model(), settings), settings) as served:
        reused = []
        for key in ("one", "two", "one"):
            response = served.http.post(
                "/v1/chat/completions",
                json={"messages": messages, "max_tokens": 1},
                headers={"Authorization": f"Bearer {key}"},
            )
            reused.append(response.json()["usage"]["prompt_tokens_details"]["exact_cached_tokens"])
    assert reused[0] == reused[1] == 0 < reused[2]
