"""Server-sent events: their order, and what happens when things go wrong half way."""

from __future__ import annotations

import json
import re
import threading
from importlib.metadata import version
from typing import Any

import openai
import pytest
from sse_starlette.sse import AppStatus

from kvlinker.doors.http.answers.answering import EventStream
from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.serving import Served

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


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


def test_a_bug_half_way_ends_the_stream_by_an_error(
    faked: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("kvlinker.doors.http.answers.answering.usage_body", broken)
    *_, last, done = events(faked, CHAT, messages=MESSAGES, max_tokens=1)
    assert (last["error"]["code"], done) == ("internal_error", "[DONE]")
    assert "a bug" in caplog.text
    assert "a bug" not in last["error"]["message"]


def test_events_are_compact_json_on_one_line(faked: Served) -> None:
    text = faked.post(CHAT, {"messages": MESSAGES, "max_tokens": 1, "stream": True}).text
    same = re.sub(r'"id":"chatcmpl-\w{24}","created":\d+', "HEAD", text)
    model = (
        '"model":"tiny","system_fingerprint":"kvlinker-'
        + f'{version("kvlinker")}-fake","object":"chat.completion.chunk"'
    )
    end = '"logprobs":null,"finish_reason":'
    assert same == "".join(
        f"data: {event}\n\n"
        for event in (
            f'{{HEAD,{model},"choices":[{{"index":0,"delta":{{"role":"assistant","content":""}},{end}null}}]}}',
            f'{{HEAD,{model},"choices":[{{"index":0,"delta":{{"content":"w0 "}},{end}null}}]}}',
            f'{{HEAD,{model},"choices":[{{"index":0,"delta":{{}},{end}"length"}}]}}',
            "[DONE]",
        )
    )


def test_comments_keep_a_silent_stream_open(
    faked: Served, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventStream, "DEFAULT_PING_INTERVAL", 0.02)
    engine.flowing.clear()
    fields = {"messages": MESSAGES, "max_tokens": 2, "stream": True}
    with faked.http.stream("POST", CHAT, json=fields) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith(":"))
        engine.flowing.set()
        assert [line for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"
    engine.flowing.clear()
    threading.Timer(0.2, engine.flowing.set).start()
    with openai.OpenAI(base_url=f"{faked.url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=2, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "w0 w1 "


def test_a_server_that_stops_finishes_its_streams(
    faked: Served, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would cut them at once; the server's own limit for shutting down is the only
    one."""
    engine.flowing.clear()
    fields = {"messages": MESSAGES, "max_tokens": 2, "stream": True}
    monkeypatch.setattr(AppStatus, "should_exit", True)  # as the library notes it at SIGTERM
    with faked.http.stream("POST", CHAT, json=fields) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert faked.get("/live").status_code == 200, "the event loop has gone round since"
        engine.flowing.set()
        *_, last, done = [line.removeprefix("data: ") for line in lines if line]
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"


def test_completion_chunks(faked: Served) -> None:
    *chunks, usage, done = events(
        faked, "/v1/completions", prompt="a", max_tokens=2, stream_options={"include_usage": True}
    )
    assert done == "[DONE]"
    assert [
        (chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks
    ] == [
        ("w0 ", None),
        ("w1 ", None),
        ("", "length"),
    ]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2


def test_usage_that_is_not_wanted_is_not_sent(faked: Served) -> None:
    for options in ({"include_usage": False}, {}, None):
        *chunks, done = events(faked, CHAT, messages=MESSAGES, max_tokens=2, stream_options=options)
        assert done == "[DONE]"
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


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
    engine.wait_until_idle()


def test_mistakes_are_told_before_the_stream(served: Served) -> None:
    answer = served.post(
        CHAT, {"messages": MESSAGES, "stream": True, "link": {"policy": "legolink-0"}}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_policy"
