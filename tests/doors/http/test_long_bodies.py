"""Long bodies are read beside the event loop, and those with far too much in them are refused
unread."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types import limits
from kvlinker.doors.http import models
from kvlinker.doors.http.edge import bodies
from kvlinker.doors.http.edge.bodies import LONG_BODY_BYTES, check_json
from tests.doors.http.serving import Served

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "a"}
PART = {"type": "text", "text": "a"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PADDING = " " * LONG_BODY_BYTES

JSON = st.recursive(
    st.none() | st.integers() | st.text('ab"\\{[,:'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('ab"\\{'), inner),
)


def counted(value: Any) -> tuple[int, int]:
    """The commas, and the objects, lists and fields of a value."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    fields = len(value) if isinstance(value, dict) else 0
    commas = max(0, len(value) - 1)
    return commas + sum(one for one, _ in inner), 1 + fields + sum(one for _, one in inner)


@given(value=JSON, piece=st.integers(2, 9))
def test_what_a_body_holds_is_counted_without_parsing(value: Any, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_PIECE_BYTES", piece)
        patch.setattr(bodies, "MOST_JSON_VALUES", counted(value)[0])
        patch.setattr(bodies, "MOST_JSON_NODES", counted(value)[1])
        check_json(json.dumps(value).encode())
        for name, count in zip(
            ("MOST_JSON_VALUES", "MOST_JSON_NODES"), counted(value), strict=True
        ):
            if count:
                with patch.context() as lower:
                    lower.setattr(bodies, name, count - 1)
                    with pytest.raises(InvalidRequestError):
                        check_json(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            b'{"messages": [' + b"[]," * limits.MOST_JSON_NODES + b"[]]}",
            "objects, lists and fields",
        ),
        (b'{"messages": ' + b"[" * 200_000, "objects, lists and fields"),
        (b'{"user": [' + b"1," * limits.MOST_JSON_VALUES + b"1, 2]}", "values"),
    ],
    ids=["lists", "depth", "values"],
)
def test_a_body_with_far_too_much_is_not_parsed(
    served: Served, monkeypatch: pytest.MonkeyPatch, content: bytes, told: str
) -> None:
    monkeypatch.setattr(models, "json", None)  # whoever parses it fails
    answer = served.http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "body_too_complex")
    assert told in answer.json()["error"]["message"]


def test_long_bodies_are_read_in_another_thread(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    original = check_json

    def noting(body: bytes) -> None:
        threads.append(threading.current_thread().name)
        original(body)

    monkeypatch.setattr(models, "check_json", noting)
    for prompt in ("a", "a" + PADDING):
        served.post("/tokenize", {"text": prompt})
    assert len(threads) == 1
    assert "AnyIO worker thread" in threads[0]


MISTAKES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": "a"}),
    (CHAT, {"messages": [USER], "n": 0}),
    (CHAT, {"messages": [USER], "top_logprobs": 1}),
    (CHAT, {}),
    ("/v1/messages", {"messages": [USER]}),
    ("/v1/responses", {"input": 5}),
]


def test_errors_of_long_bodies_are_those_of_short_ones(
    served: Served, subtests: pytest.Subtests
) -> None:
    for path, body in MISTAKES:
        with subtests.test(path, body=body):
            short = served.post(path, body)
            headers = {"Content-Type": "application/json"}
            long = served.http.post(path, content=json.dumps(body) + PADDING, headers=headers)
            assert (short.status_code, long.status_code) == (400, 400)
            assert {**long.json(), "request_id": 0} == {**short.json(), "request_id": 0}


@pytest.mark.parametrize(
    "content", [b"{" + PADDING.encode(), ("\x00".join('{"user": 1}') + PADDING).encode()]
)
def test_long_bodies_that_are_no_json(served: Served, content: bytes) -> None:
    answer = served.http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


LISTS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [USER] * (limits.MOST_MESSAGES + 1)}, "messages"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [PART] * (limits.MOST_PARTS + 1)}]},
        "messages.0.content",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [CALL] * (limits.MOST_CALLS + 1)}]},
        "messages.0.tool_calls",
    ),
    (
        CHAT,
        {"messages": [USER], "documents": [{"text": "a"}] * (limits.MOST_DOCUMENTS + 1)},
        "documents",
    ),
    ("/tokenize", {"messages": [USER] * (limits.MOST_MESSAGES + 1)}, "messages"),
    ("/v1/link/explain", {"messages": [USER], "documents": [{"text": "a"}] * 1025}, "documents"),
    ("/v1/completions", {"prompt": [PART] * (limits.MOST_PARTS + 1)}, "prompt"),
    ("/v1/completions", {"prompt": ["a"] * (limits.MAX_CHOICES + 1)}, "prompt"),
    ("/v1/completions", {"prompt": [[5]] * (limits.MAX_CHOICES + 1)}, "prompt"),
    ("/v1/responses", {"input": [USER] * (limits.MOST_MESSAGES + 1)}, "input"),
    (
        "/v1/messages",
        {"max_tokens": 1, "messages": [USER] * (limits.MOST_MESSAGES + 1)},
        "messages",
    ),
    (
        "/v1/messages",
        {"max_tokens": 1, "messages": [USER], "system": [PART] * (limits.MOST_PARTS + 1)},
        "system",
    ),
]


def test_lists_have_limits(served: Served, subtests: pytest.Subtests) -> None:
    for path, body, param in LISTS:
        with subtests.test(path, param=param, fields=list(body)):
            answer = served.post(path, body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert "List should have at most" in error["message"]
            assert error.get("param", param) == param


def test_messages_of_errors_are_short(served: Served) -> None:
    answer = served.post(CHAT, {"messages": [USER], "link": {"x" * 100_000: 1}})
    assert answer.status_code == 400
    assert len(answer.json()["error"]["message"]) <= limits.MAX_MESSAGE_CHARACTERS
