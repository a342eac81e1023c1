"""Server-sent events: their order, and what happens when things go wrong half way."""

from __future__ import annotations

import json
from typing import Any

from tests.server.fake_engine import FakeEngine
from tests.server.serving import Served

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def events(served: Served, path: str, **fields: Any) -> list[Any]:
    """The events of a streamed answer; ``[DONE]`` as that text."""
    answer = served.post(path, {"stream": True, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines.pop() == ""
    data = [line.removeprefix("data: ") for line in lines]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


def test_chat_chunks(faked: Served) -> None:
    *chunks, done = events(faked, CHAT, messages=MESSAGES, max_tokens=3)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "w0 "},
        {"content": "w1 "},
        {"content": "w2 "},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]
    assert all("usage" not in chunk for chunk in chunks)


def test_completion_chunks(faked: Served) -> None:
    *chunks, usage, done = events(
        faked, "/v1/completions", prompt="a", max_tokens=2, stream_options={"include_usage": True}
    )
    assert done == "[DONE]"
    assert [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [
        ("w0 ", None),
        ("w1 ", None),
        ("", "length"),
    ]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2


def test_failure_half_way_is_an_event(faked: Served, engine: FakeEngine) -> None:
    engine.fails_at = 2
    *_, last, error, done = events(faked, CHAT, messages=MESSAGES, max_tokens=5)
    assert last["choices"][0]["delta"] == {"content": "w1 "}
    assert "Its log says why" in error["error"].pop("message")
    assert error == {"error": {"type": "server_error", "param": None, "code": "internal_error"}}
    assert done == "[DONE]"


def test_failure_of_one_choice_frees_the_others(faked: Served, engine: FakeEngine) -> None:
    engine.fails_at = 0
    answer = faked.post(CHAT, {"messages": MESSAGES, "n": 2})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert engine.wait_until_idle()


def test_mistakes_are_told_before_the_stream(served: Served) -> None:
    answer = served.post(CHAT, {"messages": MESSAGES, "stream": True, "link": {"policy": "legolink-0"}})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_policy"
